// Activations: conversions of their types, and the quantiser of W4A4 layers.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int BLOCK = 16;

static inline uint32_t bits_of(float v) {
  uint32_t b;
  memcpy(&b, &v, 4);
  return b;
}
static inline float float_of(uint32_t b) {
  float v;
  memcpy(&v, &b, 4);
  return v;
}

// ------------------------------------------------------------------------------------------- float32, bfloat16, float16
struct Bf16 {
  uint16_t b;
};
struct Fp16 {
  uint16_t b;
};

static inline float to_float(float v) { return v; }
static inline float to_float(Bf16 v) { return float_of(static_cast<uint32_t>(v.b) << 16); }
static inline float to_float(Fp16 v) {
  const uint32_t magnitude = v.b & 0x7FFFu, sign = static_cast<uint32_t>(v.b & 0x8000u) << 16;
  const float normal = float_of((magnitude << 13) + (112u << 23) + (magnitude >= 0x7C00u ? 112u << 23 : 0u));
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * (1.0f / (1 << 24));
  return float_of(bits_of(magnitude < 0x400u ? subnormal : normal) | sign);
}

static inline void round_to(float v, float* out) { *out = v; }
static inline void round_to(float v, Bf16* out) {
  const uint32_t b = bits_of(v);
  out->b = static_cast<uint16_t>(v != v ? 0x7FC0u : (b + 0x7FFFu + ((b >> 16) & 1)) >> 16);
}
static inline void round_to(float v, Fp16* out) {
  const uint32_t b = bits_of(v), magnitude = b & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: the sum's last bit is worth 2^-24
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    const uint32_t rounded = (magnitude + 0xFFFu + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    half = rounded < 0x7C00u ? rounded : 0x7C00u;
  }
  out->b = static_cast<uint16_t>(half | ((b >> 16) & 0x8000u));
}

#if defined(__AVX512F__)
static inline __m512 load_block(const float* p) { return _mm512_loadu_ps(p); }
static inline __m512 load_block(const Bf16* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
static inline __m512 load_block(const Fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#endif

// ------------------------------------------------------------------------------------------------------------- quantise
// The recipe of nvfp4_utils.quantize_nvfp4 on up to COUNT blocks of a row, each step rounded once.
struct Quantiser {
  static constexpr int COUNT = 16;
  alignas(64) float scale[COUNT];
  alignas(64) float inverse[COUNT];  // what x is multiplied by
  alignas(64) int32_t sum[COUNT];    // of a block's doubled values
  alignas(64) float x[COUNT][BLOCK];

  // Fills x, scale and inverse.
  template <class T>
  void scales(const T* from, int blocks, float global_scale_inv) {
    alignas(64) uint32_t largest[COUNT] = {};  // magnitudes compare as integers
    for (int b = 0; b < blocks; ++b) {
#if defined(__AVX512F__)
      const __m512 values = load_block(from + b * BLOCK);
      _mm512_store_ps(x[b], values);
      const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7FFFFFFF));
      const __mmask16 number = _mm512_cmple_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
      const uint32_t amax = _mm512_reduce_max_epu32(_mm512_maskz_mov_epi32(number, magnitude));
      largest[b] = number ? amax : 0x7FC00000u;
#else
      int32_t amax = 0, nans = 0;
      for (int i = 0; i < BLOCK; ++i) {
        x[b][i] = to_float(from[b * BLOCK + i]);
        const int32_t magnitude = static_cast<int32_t>(bits_of(x[b][i]) & 0x7FFFFFFFu);
        const bool nan = magnitude > 0x7F800000;
        const int32_t counted = nan ? 0 : magnitude;
        amax = counted > amax ? counted : amax;
        nans += nan;
      }
      largest[b] = nans == BLOCK ? 0x7FC00000u : static_cast<uint32_t>(amax);
#endif
    }
    const float to_scale = global_scale_inv * (1.0f / 6.0f), global_scale = 1.0f / global_scale_inv;
    for (int b = 0; b < COUNT; ++b) {
      const float s = float_of(largest[b]) * to_scale;
      const uint32_t bits = bits_of(s);
      const uint32_t normal = (bits - (120u << 23) + 0x7FFFFu + ((bits >> 20) & 1)) >> 20;
      const uint32_t subnormal = bits_of(s + 24576.0f) - bits_of(24576.0f);  // its last bit is worth 2^-9
      uint32_t byte = bits < 0x3C800000u ? subnormal : bits > 0x43E00000u ? 0x7Eu : normal;
      byte = bits > 0x7F800000u ? 0x7Fu : byte;
      const float tiny = static_cast<float>(static_cast<int32_t>(byte)) * (1.0f / 512);
      float value = byte < 8 ? tiny : float_of((byte + (120u << 3)) << 20);
      value = byte == 0x7Fu ? NAN : value;
      const float raw = 1.0f / (value * global_scale);
      inverse[b] = raw > 3.402823466e38f ? 3.402823466e38f : raw;
      scale[b] = value;
    }
  }

#if defined(__AVX512F__)
  // e2m1 of block b, once scales() has run, as run() rounds.
  __m512 values(int b) const {
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    const __m512i v = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(x[b]), _mm512_set1_ps(inverse[b])));
    const __m512i magnitude = _mm512_andnot_si512(sign, v);
    const __m512 m = _mm512_castsi512_ps(_mm512_min_epu32(magnitude, _mm512_set1_epi32(0x40C00000)));
    const __mmask16 below_4 = _mm512_cmp_ps_mask(m, _mm512_set1_ps(4.0f), _CMP_LT_OQ);
    const __mmask16 below_2 = _mm512_cmp_ps_mask(m, _mm512_set1_ps(2.0f), _CMP_LT_OQ);
    __m512 magic = _mm512_mask_mov_ps(_mm512_set1_ps(25165824.0f), below_4, _mm512_set1_ps(12582912.0f));
    magic = _mm512_mask_mov_ps(magic, below_2, _mm512_set1_ps(6291456.0f));
    const __m512i rounded = _mm512_castps_si512(_mm512_sub_ps(_mm512_add_ps(m, magic), magic));
    const __mmask16 number = _mm512_cmple_epu32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
    return _mm512_castsi512_ps(_mm512_or_si512(rounded, _mm512_maskz_and_epi32(number, v, sign)));
  }
#endif

  // Writes 2 * e2m1 of block b to doubled + b * stride.
  template <class T>
  void run(const T* from, int blocks, float global_scale_inv, int8_t* doubled, int64_t stride) {
    scales(from, blocks, global_scale_inv);
    for (int b = 0; b < blocks; ++b) {
      alignas(64) int32_t wide[BLOCK];
      for (int i = 0; i < BLOCK; ++i) {
        const float v = x[b][i] * inverse[b];
        const uint32_t magnitude_bits = bits_of(v) & 0x7FFFFFFFu;
        const float m = float_of(magnitude_bits < 0x40C00000u ? magnitude_bits : 0x40C00000u);  // NaN too becomes 6
        // Adding 1.5 * 2^(22..24) rounds to a multiple of 0.5, 1 or 2, ties to even.
        const float magic = m < 2.0f ? 6291456.0f : m < 4.0f ? 12582912.0f : 25165824.0f;
        const int32_t twice = static_cast<int32_t>(((m + magic) - magic) * 2.0f);
        const bool negative = bits_of(v) >> 31 && magnitude_bits <= 0x7F800000u;
        wide[i] = negative ? -twice : twice;
      }
      sum[b] = 0;
      for (int i = 0; i < BLOCK; ++i) sum[b] += wide[i];
      for (int i = 0; i < BLOCK; ++i) doubled[b * stride + i] = static_cast<int8_t>(wide[i]);
    }
  }
};
