// One vector type per instruction set, chosen by the compiler's flags. All of them compute the same bits.
//
// Codes of LANES rows come 8 columns at a time; 16 bytes hold 4 rows (the layout is in fp4_gemm.cpp).
// unpack(): a register holds 4 consecutive k of each row, one byte each, as 2 * e2m1 + 12 (0..24): unsigned, since the
// dot-product instructions multiply unsigned by signed bytes. The caller takes 12 * sum(a) off again.
// four(): e2m1 of 4 consecutive k of each row, those in the low or the high nibbles, one k to a register.
// Where TABLES is defined a register holds a table of 16 float32: column() looks up one of the 8 columns of by_row()'s codes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define FOUR_TIMES(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
alignas(64) static const uint8_t E2M1_DOUBLED[64] = {
    FOUR_TIMES(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)};
alignas(64) static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
alignas(64) static const float E2M1_EIGHTHS[16] = {0,     .0625f,  .125f,  .1875f,  .25f,  .375f,  .5f,  .75f,
                                                   -0.0f, -.0625f, -.125f, -.1875f, -.25f, -.375f, -.5f, -.75f};
// The upper and the lower byte of E2M1 in bfloat16.
alignas(64) static const uint8_t E2M1_UPPER[64] = {FOUR_TIMES(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,  //
                                                              0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0)};
alignas(64) static const uint8_t E2M1_LOWER[64] = {FOUR_TIMES(0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0,  //
                                                              0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0)};
// Of 4 rows' bytes [2][4][2] as they are stored, those of each row together.
alignas(64) static const uint8_t BY_ROW[64] = {FOUR_TIMES(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)};

// 1.5 * 2^23. An integer below 2^22 added to its bits is the same integer added to its value.
static constexpr float MAGIC = 12582912.0f;
static constexpr int32_t MAGIC_BITS = 0x4B400000;

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL
#endif

static inline int32_t load_int32(const void* p) {
  int32_t value;
  memcpy(&value, p, 4);
  return value;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

struct Simd {
  static constexpr int LANES = 16, VECTORS = 2, KEPT_VECTORS = 2, KEPT_ROWS = 8;
  using Int = __m512i;
  using Float = __m512;

  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static Float broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Int broadcast(const int32_t* p) { return _mm512_set1_epi32(*p); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float constant(float v) { return _mm512_set1_ps(v); }
  static Float scaled(Int biased, Float s) { return fma(_mm512_castsi512_ps(biased), s, mul(s, constant(-MAGIC))); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    const Int table = _mm512_load_si512(E2M1_DOUBLED);
    UNROLL for (int z = 0; z < 2; ++z) {
      const Int both = by_row(codes + 64 * z);
#if defined(__AVX512VBMI__)  // the index's upper bits are ignored: the table repeats
      w[2 * z] = _mm512_permutexvar_epi8(both, table);
      w[2 * z + 1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(both, 4), table);
#else
      const Int low = _mm512_set1_epi8(15);
      w[2 * z] = _mm512_shuffle_epi8(table, _mm512_and_si512(both, low));
      w[2 * z + 1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
#endif
    }
  }
#define TABLES
  static Int by_row(const uint8_t* codes) {
    return _mm512_shuffle_epi8(_mm512_loadu_si512(codes), _mm512_load_si512(BY_ROW));
  }
  static Float column(Int codes, int k, Float table) {  // the index's upper bits are ignored
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, k % 4 * 8 + k / 4 * 4), table);
  }
  static void four(const uint8_t* codes, bool high, Float w[4]) {
    const Int both = by_row(codes);
    UNROLL for (int k = 0; k < 4; ++k) w[k] = column(both, 4 * high + k, _mm512_load_ps(E2M1));
  }
  static Float scales(const uint8_t* p) {  // as float16 bits, an e4m3 value / 256
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 7));
  }
  static Int load_weights(const uint8_t* p) { return _mm512_load_si512(p); }
  static void store_weights(uint8_t* p, Int w) { _mm512_store_si512(p, w); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
    UNROLL for (int q = 0; q < 4; ++q) sum = _mm512_dpbusd_epi32(sum, w[q], _mm512_set1_epi32(load_int32(a + 4 * q)));
    return sum;
  }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Simd {
  static constexpr int LANES = 8, VECTORS = 1, KEPT_VECTORS = 2, KEPT_ROWS = 4;
  using Int = __m256i;
  using Float = __m256;

  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static Float broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Int broadcast(const int32_t* p) { return _mm256_set1_epi32(*p); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float constant(float v) { return _mm256_set1_ps(v); }
  static Float scaled(Int biased, Float s) { return fma(_mm256_castsi256_ps(biased), s, mul(s, constant(-MAGIC))); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    const Int table = load_weights(E2M1_DOUBLED), low = _mm256_set1_epi8(15);
    UNROLL for (int z = 0; z < 2; ++z) {
      const Int both = _mm256_shuffle_epi8(load_codes(codes + 64 * z), load_weights(BY_ROW));
      w[2 * z] = _mm256_shuffle_epi8(table, _mm256_and_si256(both, low));
      w[2 * z + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
    }
  }
  static Int load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const Int*>(p)); }
  static void four(const uint8_t* codes, bool high, Float w[4]) {
    const Int both = load_codes(codes), odd = _mm256_set1_epi32(-65536);
    const Int index = _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    const Int upper = _mm256_shuffle_epi8(load_weights(E2M1_UPPER), index);
    const Int lower = _mm256_shuffle_epi8(load_weights(E2M1_LOWER), index);
    UNROLL for (int h = 0; h < 2; ++h) {  // two k of each row, as bfloat16
      const Int pair = h ? _mm256_unpackhi_epi8(lower, upper) : _mm256_unpacklo_epi8(lower, upper);
      w[2 * h] = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
      w[2 * h + 1] = _mm256_castsi256_ps(_mm256_and_si256(pair, odd));
    }
  }
  static Float scales(const uint8_t* p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_slli_epi16(wide, 7));
  }
  static Int load_weights(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const Int*>(p)); }
  static void store_weights(uint8_t* p, Int w) { _mm256_store_si256(reinterpret_cast<Int*>(p), w); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
#if defined(__AVXVNNI__)
    UNROLL for (int q = 0; q < 4; ++q) sum = _mm256_dpbusd_avx_epi32(sum, w[q], _mm256_set1_epi32(load_int32(a + 4 * q)));
    return sum;
#else  // 8 products of at most 24 * 128 to each int16: no overflow
    Int pairs = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(load_int32(a)));
    UNROLL for (int q = 1; q < 4; ++q)
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[q], _mm256_set1_epi32(load_int32(a + 4 * q))));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
};

#elif defined(__ARM_FEATURE_DOTPROD)

struct Simd {
  static constexpr int LANES = 4, VECTORS = 2, KEPT_VECTORS = 4, KEPT_ROWS = 6;
  using Int = int32x4_t;
  using Float = float32x4_t;

  static Float load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Float v) { vst1q_f32(p, v); }
  static Float broadcast(const float* p) { return vld1q_dup_f32(p); }
  static Int broadcast(const int32_t* p) { return vld1q_dup_s32(p); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float constant(float v) { return vdupq_n_f32(v); }
  static Float scaled(Int biased, Float s) { return fma(vreinterpretq_f32_s32(biased), s, mul(s, constant(-MAGIC))); }

  static void unpack(const uint8_t* codes, Int w[4]) {
    const uint8x16_t table = vld1q_u8(E2M1_DOUBLED);
    UNROLL for (int z = 0; z < 2; ++z) {
      const uint8x16_t both = vqtbl1q_u8(vld1q_u8(codes + 64 * z), vld1q_u8(BY_ROW));
      w[2 * z] = vreinterpretq_s32_u8(vqtbl1q_u8(table, vandq_u8(both, vdupq_n_u8(15))));
      w[2 * z + 1] = vreinterpretq_s32_u8(vqtbl1q_u8(table, vshrq_n_u8(both, 4)));
    }
  }
  static void four(const uint8_t* codes, bool high, Float w[4]) {
    const uint8x16_t both = vld1q_u8(codes);
    const uint8x16_t index = high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    const uint8x16_t upper = vqtbl1q_u8(vld1q_u8(E2M1_UPPER), index), lower = vqtbl1q_u8(vld1q_u8(E2M1_LOWER), index);
    UNROLL for (int h = 0; h < 2; ++h) {  // two k of each row, as bfloat16
      const uint32x4_t pair = vreinterpretq_u32_u8(h ? vzip2q_u8(lower, upper) : vzip1q_u8(lower, upper));
      w[2 * h] = vreinterpretq_f32_u32(vshlq_n_u32(pair, 16));
      w[2 * h + 1] = vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xFFFF0000u)));
    }
  }
  static Float scales(const uint8_t* p) {
    const uint16x4_t wide = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load_int32(p)))));
    return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(wide, 7)));
  }
  static Int load_weights(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  static void store_weights(uint8_t* p, Int w) { vst1q_u8(p, vreinterpretq_u8_s32(w)); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
    UNROLL for (int q = 0; q < 4; ++q)
      sum = vdotq_s32(sum, vreinterpretq_s8_s32(w[q]), vreinterpretq_s8_s32(vdupq_n_s32(load_int32(a + 4 * q))));
    return sum;
  }
};

#else  // any CPU

struct Simd {
  static constexpr int LANES = 8, VECTORS = 1, KEPT_VECTORS = 2, KEPT_ROWS = 4;
  struct Int {
    uint32_t v[LANES];
  };
  struct Float {
    float v[LANES];
  };
  template <class R, class F>
  static R each(F f) {
    R r;
    for (int i = 0; i < LANES; ++i) r.v[i] = f(i);
    return r;
  }

  static Float load(const float* p) { return each<Float>([=](int i) { return p[i]; }); }
  static void store(float* p, Float v) { memcpy(p, v.v, sizeof v.v); }
  static Float constant(float v) { return each<Float>([=](int) { return v; }); }
  static Float broadcast(const float* p) { return constant(*p); }
  static Int broadcast(const int32_t* p) { return each<Int>([=](int) { return static_cast<uint32_t>(*p); }); }
  static Float add(Float a, Float b) { return each<Float>([&](int i) { return a.v[i] + b.v[i]; }); }
  static Float mul(Float a, Float b) { return each<Float>([&](int i) { return a.v[i] * b.v[i]; }); }
  static Float scaled(Int biased, Float s) {
    const Float f = of_bits(biased);
    return each<Float>([&](int i) { return (f.v[i] - MAGIC) * s.v[i]; });
  }
  static Float fma(Float a, Float b, Float c) {
    return each<Float>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }

  static void unpack(const uint8_t* codes, Int w[4]) {
    uint8_t bytes[4][4 * LANES];
    for (int i = 0; i < 4 * LANES; ++i)
      for (int z = 0; z < 2; ++z) {
        const uint8_t both = codes[64 * z + i / 16 * 16 + BY_ROW[i % 16]];
        bytes[2 * z][i] = E2M1_DOUBLED[both & 15];
        bytes[2 * z + 1][i] = E2M1_DOUBLED[both >> 4];
      }
    memcpy(w, bytes, sizeof bytes);
  }
  static void four(const uint8_t* codes, bool high, Float w[4]) {
    for (int k = 0; k < 4; ++k)
      w[k] = each<Float>([=](int i) {
        const uint8_t both = codes[i / 4 * 16 + BY_ROW[i % 4 * 4 + k]];
        return E2M1[high ? both >> 4 : both & 15];
      });
  }
  static Float of_bits(Int p) {
    Float f;
    memcpy(f.v, p.v, sizeof f.v);
    return f;
  }
  static Float scales(const uint8_t* p) {
    return each<Float>([=](int i) {
      const int exponent = p[i] >> 3, mantissa = p[i] & 7;
      const float step = 1.0f / (1 << 17);  // of subnormals, divided by 256
      return exponent ? static_cast<float>((8 + mantissa) << (exponent - 1)) * step : mantissa * step;
    });
  }
  static Int load_weights(const uint8_t* p) {
    Int w;
    memcpy(w.v, p, sizeof w.v);
    return w;
  }
  static void store_weights(uint8_t* p, Int w) { memcpy(p, w.v, sizeof w.v); }
  static Int dot(Int sum, const Int w[4], const int8_t* a) {
    for (int q = 0; q < 4; ++q) {
      uint8_t bytes[4 * LANES];
      memcpy(bytes, w[q].v, sizeof bytes);
      for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) sum.v[i] += static_cast<uint32_t>(bytes[4 * i + j] * a[4 * q + j]);
    }
    return sum;
  }
};

#endif
