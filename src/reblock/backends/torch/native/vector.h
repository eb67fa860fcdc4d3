// Vectors of floats in the width of the processor, and what both kernels do with them.
//
// GCC's and Clang's vector extensions, so one source serves AVX-512, AVX2, NEON and anything else:
// a compiler takes the operations of a vector apart where the processor has none of that width.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define REBLOCK_UNROLL _Pragma("unroll")
#else
#define REBLOCK_UNROLL _Pragma("GCC unroll 32")
#endif
#define REBLOCK_INLINE inline __attribute__((always_inline))

namespace reblock {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Weights are packed, and queries and keys are taken, sixteen at a time whatever the width.
constexpr int kPanel = 16;
constexpr int kVectors = kPanel / kLanes;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef float Quad __attribute__((vector_size(16)));

struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
REBLOCK_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

REBLOCK_INLINE Vec splat(float value) {
  return Vec{} + value;
}

REBLOCK_INLINE Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// The one thing that is told each kind of processor by name: compilers take the conversion apart.
REBLOCK_INLINE WordVec widen(HalfVec half) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return bits_of<WordVec>(_mm512_cvtepu16_epi32(bits_of<__m256i>(half)));
#elif defined(__AVX2__)
  return bits_of<WordVec>(_mm256_cvtepu16_epi32(bits_of<__m128i>(half)));
#else
  return __builtin_convertvector(half, WordVec);
#endif
}

REBLOCK_INLINE Vec load(const BFloat16* from) {
  HalfVec half;
  std::memcpy(&half, from, sizeof half);
  return bits_of<Vec>(widen(half) << 16);
}

// The first `count` lanes; the others are zero.
template <class T>
REBLOCK_INLINE Vec load_some(const T* from, int64_t count) {
  T whole[kLanes] = {};
  std::memcpy(whole, from, count * sizeof(T));
  return load(whole);
}

REBLOCK_INLINE void store(float* to, Vec vector) {
  std::memcpy(to, &vector, sizeof vector);
}

inline float to_float(float value) {
  return value;
}

inline float to_float(BFloat16 value) {
  return bits_of<float>(uint32_t(value.bits) << 16);
}

inline float to_float(int8_t value) {
  return float(value);
}

// Rounds to the nearest, ties to even; what is no number stays none.
inline void assign(BFloat16* to, float value) {
  uint32_t bits = bits_of<uint32_t>(value);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = is_nan ? uint16_t((bits >> 16) | 0x40u)
                    : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void assign(float* to, float value) {
  *to = value;
}

template <class To, class From>
inline void convert(To* to, const From* from, int64_t count) {
  for (int64_t i = 0; i < count; i++) assign(to + i, to_float(from[i]));
}

inline void convert(float* to, const float* from, int64_t count) {
  std::memcpy(to, from, count * sizeof(float));
}

inline void convert(BFloat16* to, const BFloat16* from, int64_t count) {
  std::memcpy(to, from, count * sizeof(BFloat16));
}

REBLOCK_INLINE Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}

REBLOCK_INLINE Vec min(Vec a, Vec b) {
  return a < b ? a : b;
}

// e to the x, with a relative error of 2e-7; x below -87 counts as -87, above 88 as 88.
REBLOCK_INLINE Vec exp(Vec x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
  const float magic = 12582912.0f;
  Vec shifted = x * 1.44269504f + magic;
  Vec whole = shifted - magic;
  Vec rest = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  Vec series = rest * 1.98756915e-4f + 1.39819995e-3f;
  series = series * rest + 8.33345192e-3f;
  series = series * rest + 4.16657960e-2f;
  series = series * rest + 1.66666657e-1f;
  series = series * rest + 0.5f;
  series = series * rest * rest + rest + 1.0f;
  WordVec power = bits_of<WordVec>(shifted) << 23;
  return bits_of<Vec>(bits_of<WordVec>(series) + power);
}

// cap * tanh(x / cap)
REBLOCK_INLINE Vec soften(Vec x, float cap) {
  Vec grown = exp(x * (2.0f / cap));
  return cap - (2.0f * cap) / (grown + 1.0f);
}

REBLOCK_INLINE float sum(Vec vector) {
  Quad quads[kLanes / 4];
  std::memcpy(quads, &vector, sizeof vector);
  Quad all = quads[0];
  for (int i = 1; i < kLanes / 4; i++) all += quads[i];
  return (all[0] + all[2]) + (all[1] + all[3]);
}

REBLOCK_INLINE float highest(Vec vector) {
  Quad quads[kLanes / 4];
  std::memcpy(quads, &vector, sizeof vector);
  Quad all = quads[0];
  for (int i = 1; i < kLanes / 4; i++) all = all > quads[i] ? all : quads[i];
  float low = all[0] > all[1] ? all[0] : all[1], high = all[2] > all[3] ? all[2] : all[3];
  return low > high ? low : high;
}

#if defined(__clang__)
#define REBLOCK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define REBLOCK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a > b){__VA_ARGS__})
#endif

REBLOCK_INLINE Quad load_quad(const float* from) {
  Quad out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

REBLOCK_INLINE Quad load_quad(const BFloat16* from) {
  return Quad{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
}

// Writes four rows of four, `step` apart, as four rows `to_step` apart, turned over.
template <class X>
REBLOCK_INLINE void transpose(const X* from, int64_t step, float* to, int64_t to_step) {
  Quad a = load_quad(from), b = load_quad(from + step);
  Quad c = load_quad(from + 2 * step), d = load_quad(from + 3 * step);
  Quad ac_low = REBLOCK_SHUFFLE(a, c, 0, 4, 1, 5), ac_high = REBLOCK_SHUFFLE(a, c, 2, 6, 3, 7);
  Quad bd_low = REBLOCK_SHUFFLE(b, d, 0, 4, 1, 5), bd_high = REBLOCK_SHUFFLE(b, d, 2, 6, 3, 7);
  Quad out[4] = {REBLOCK_SHUFFLE(ac_low, bd_low, 0, 4, 1, 5),
                 REBLOCK_SHUFFLE(ac_low, bd_low, 2, 6, 3, 7),
                 REBLOCK_SHUFFLE(ac_high, bd_high, 0, 4, 1, 5),
                 REBLOCK_SHUFFLE(ac_high, bd_high, 2, 6, 3, 7)};
  for (int i = 0; i < 4; i++) std::memcpy(to + i * to_step, &out[i], sizeof(Quad));
}

// The sums of four vectors, a step for all of them at once.
REBLOCK_INLINE Quad sums(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define REBLOCK_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define REBLOCK_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define REBLOCK_FIRST 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define REBLOCK_SECOND 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif defined(__AVX2__)
#define REBLOCK_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define REBLOCK_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define REBLOCK_FIRST 0, 1, 8, 9, 4, 5, 12, 13
#define REBLOCK_SECOND 2, 3, 10, 11, 6, 7, 14, 15
#else
#define REBLOCK_LOW 0, 4, 1, 5
#define REBLOCK_HIGH 2, 6, 3, 7
#define REBLOCK_FIRST 0, 1, 4, 5
#define REBLOCK_SECOND 2, 3, 6, 7
#endif
  Vec ab = REBLOCK_SHUFFLE(a, b, REBLOCK_LOW) + REBLOCK_SHUFFLE(a, b, REBLOCK_HIGH);
  Vec cd = REBLOCK_SHUFFLE(c, d, REBLOCK_LOW) + REBLOCK_SHUFFLE(c, d, REBLOCK_HIGH);
  Vec all = REBLOCK_SHUFFLE(ab, cd, REBLOCK_FIRST) + REBLOCK_SHUFFLE(ab, cd, REBLOCK_SECOND);
  Quad quads[kLanes / 4];
  std::memcpy(quads, &all, sizeof all);
  Quad out = quads[0];
  for (int i = 1; i < kLanes / 4; i++) out += quads[i];
  return out;
}

// Packed weights are words of 32 bits, sixteen outputs side by side. A word holds as many inputs of
// one output as fit, the first in its lowest bits, so that they come apart by shifts, which every
// processor has, and not by moves across lanes.
template <class W>
constexpr int kInputsOfWord = 4 / sizeof(W);

// Input kIndex of every word.
template <int kIndex>
REBLOCK_INLINE Vec take_apart(const float*, WordVec words) {
  return bits_of<Vec>(words);
}

template <int kIndex>
REBLOCK_INLINE Vec take_apart(const BFloat16*, WordVec words) {
  return bits_of<Vec>(kIndex == 0 ? words << 16 : words & 0xffff0000u);
}

template <int kIndex>
REBLOCK_INLINE Vec take_apart(const int8_t*, WordVec words) {
  return __builtin_convertvector(bits_of<IntVec>(words << (24 - 8 * kIndex)) >> 24, Vec);
}

REBLOCK_INLINE WordVec load_words(const void* from) {
  WordVec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// Calls use(index) with every index of an input in a word, as a constant.
template <class W, class Use>
REBLOCK_INLINE void each_of_word(const Use& use) {
  use(std::integral_constant<int, 0>{});
  if constexpr (kInputsOfWord<W> > 1) use(std::integral_constant<int, 1>{});
  if constexpr (kInputsOfWord<W> > 2) {
    use(std::integral_constant<int, 2>{});
    use(std::integral_constant<int, 3>{});
  }
}

// Sums that the registers hold beside what is multiplied.
#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kMostSums = 24;
#elif defined(__aarch64__)
constexpr int kMostSums = 24;
#else
constexpr int kMostSums = 12;
#endif

// Adds to out those sums of kSums that are the kFirst-th and kCount - 1 further ones; see `multiply`.
template <int kRows, int kSums, int kFirst, int kCount, int kAhead, class W>
REBLOCK_INLINE void multiply_part(const float* x, int64_t step, int64_t row, const W* w,
                                  int64_t num_words, Vec (&out)[kRows][kVectors]) {
  constexpr int kInputs = kInputsOfWord<W>;
  constexpr int kTogether = kSums > kInputs ? kSums / kInputs : 1;
  Vec sums[kCount][kRows][kVectors] = {};
  auto take = [&](auto offset) __attribute__((always_inline)) {
    const W* words = w + offset * kPanel * kInputs;
    if (kAhead > 0 && kFirst == 0)
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kAhead);
    WordVec loaded[kVectors];
    REBLOCK_UNROLL
    for (int v = 0; v < kVectors; v++) loaded[v] = load_words(words + v * kLanes * kInputs);
    each_of_word<W>([&](auto index) __attribute__((always_inline)) {
      constexpr int kSum = (offset * kInputs + index) % kSums - kFirst;
      if constexpr (kSum >= 0 && kSum < kCount) {
        const float* input = x + (offset * kInputs + index) * step;
        Vec weights[kVectors];
        REBLOCK_UNROLL
        for (int v = 0; v < kVectors; v++) weights[v] = take_apart<index>(w, loaded[v]);
        REBLOCK_UNROLL
        for (int m = 0; m < kRows; m++)
          REBLOCK_UNROLL
          for (int v = 0; v < kVectors; v++) sums[kSum][m][v] += weights[v] * input[m * row];
      }
    });
  };
  int64_t i = 0;
  for (; i + kTogether <= num_words; i += kTogether) {
    take(std::integral_constant<int, 0>{});
    if constexpr (kTogether > 1) take(std::integral_constant<int, 1>{});
    x += kTogether * kInputs * step;
    w += kTogether * kInputs * kPanel;
  }
  if (kTogether > 1 && i < num_words) take(std::integral_constant<int, 0>{});
  REBLOCK_UNROLL
  for (int s = 0; s < kCount; s++)
    REBLOCK_UNROLL
    for (int m = 0; m < kRows; m++)
      REBLOCK_UNROLL
      for (int v = 0; v < kVectors; v++) out[m][v] += sums[s][m][v];
}

// A tile of a product: out[m] += x[m] * w over `num_words` rows of words, for kRows rows and one
// panel.
//
// Input k of row m is at x[k * step + m * row]. Each output is kSums sums, one or two, of which one
// takes every kSums-th input, so that a tile of few rows does not wait for its own last sum. Where
// the registers do not hold them all, they are made one after the other. Either way the same numbers
// are added in the same order: what a row gives does not depend on the rows beside it. Memory is
// asked for what lies kAhead bytes further on.
template <int kRows, int kSums, int kAhead, class W>
REBLOCK_INLINE void multiply(const float* x, int64_t step, int64_t row, const W* w,
                             int64_t num_words, Vec (&out)[kRows][kVectors]) {
  static_assert(kSums == 1 || kSums == 2, "");
  if constexpr (kSums * kRows * kVectors <= kMostSums) {
    multiply_part<kRows, kSums, 0, kSums, kAhead>(x, step, row, w, num_words, out);
  } else {
    multiply_part<kRows, kSums, 0, 1, kAhead>(x, step, row, w, num_words, out);
    if constexpr (kSums > 1)
      multiply_part<kRows, kSums, 1, 1, kAhead>(x, step, row, w, num_words, out);
  }
}

}  // namespace reblock
