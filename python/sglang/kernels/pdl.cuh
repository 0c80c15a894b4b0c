// Programmatic dependent launch, from compute capability 9.0 on.
//
// A kernel lets the stream's next one begin at once, and itself waits for the previous one before it touches what
// kernels write; the model's parameters, which none writes, may be read before. Since every kernel waits, one that has
// ended implies that all before it have.
//
// decode_attention.cu reads more before it waits: lengths, slots, angles and older tokens. Kernels that write those,
// decode_inputs and cos_sin, do not let the next one begin early: whatever comes later begins when they have ended, and
// older tokens were written before that. Only the wait makes memory agree for all: so they write through to L2 before they
// end (write_through), and attention reads from there (__ldcg).
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

__device__ __forceinline__ void begin_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void write_through() { __threadfence(); }
