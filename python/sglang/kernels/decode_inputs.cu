// What the next decode step reads of each request, whose new slot is noted in the table. pdl.cuh is put in front of it.
struct DecodeInputsParams {
  const long long *token_ids; // [requests], the newest tokens; negative: there was none to choose
  const long long *positions; // [requests], theirs
  const long long *rows;      // [requests], of the table
  const long long *pages;     // a new one for each request whose token begins one, in this order
  int *table;                 // slots, rows at multiples of stride
  long long *out;             // [3, requests]: input ids, lengths with the new tokens, their slots
  long long stride;
  int page_size;              // slots of a page
};

extern "C" __global__ void __launch_bounds__(32) decode_inputs(const __grid_constant__ DecodeInputsParams p) {
  wait_for_previous_kernel(); // and lets no kernel begin early, see pdl.cuh
  const int request = blockIdx.x;
  int taken = 0; // pages, by the requests before this one
  for (int i = threadIdx.x; i < request; i += 32) taken += p.positions[i] % p.page_size == 0;
#pragma unroll
  for (int o = 16; o; o >>= 1) taken += __shfl_xor_sync(~0u, taken, o);
  if (threadIdx.x) return;
  const long long token = p.token_ids[request], position = p.positions[request];
  int *const place = p.table + p.rows[request] * p.stride + position;
  const long long slot = position % p.page_size ? place[-1] + 1 : p.pages[taken] * p.page_size;
  *place = slot;
  long long *const out = p.out + request;
  out[0] = token < 0 ? 0 : token;
  out[gridDim.x] = position + 1;
  out[2 * gridDim.x] = slot;
  write_through();
}
