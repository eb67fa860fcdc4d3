// The native operators against plain loops in double, in a program without torch, so that it can be
// built for any processor and run there or under emulation.
//
// Prints how many lanes a vector has; ends with 1 and a message where a result is wrong. The letters
// of shapes are those of linear.h and cache.h.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"

using namespace reblock;

namespace {

// As in native_checks.py: of |x| |w|, and of outputs that are means of normal values.
template <class T>
constexpr double kLinearError = sizeof(T) == 4 ? 1e-6 : 1.0 / 256;
template <class T>
constexpr double kAttentionError = sizeof(T) == 4 ? 5e-6 : 1.0 / 64;

std::mt19937 generator(1);

float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(generator);
}

template <class T>
std::vector<T> normals(int64_t count) {
  std::vector<T> out(count);
  for (T& each : out) assign(&each, normal());
  return out;
}

template <class T>
const char* name_of() {
  return sizeof(T) == 4 ? "float32" : sizeof(T) == 2 ? "bfloat16" : "int8";
}

// What is no number is wrong as well.
void check(double error, double bound, const std::string& what) {
  if (error <= bound) return;
  std::printf("%s: off by %g, which may be %g\n", what.c_str(), error, bound);
  std::exit(1);
}

template <class T>
void check_same(const T* one, const T* other, int64_t count, const std::string& what) {
  if (std::memcmp(one, other, count * sizeof(T)) == 0) return;
  std::printf("%s: not the same to the bit\n", what.c_str());
  std::exit(1);
}

template <class W>
struct Weight {
  int64_t outputs, inputs, words;
  std::vector<W> packed;      // [ceil(N / 16)][words][16][inputs of a word]
  std::vector<float> scales;  // [N], or empty
  std::vector<double> exact;  // [N][K], what it stands for
};

// What to multiply a row by when it is packed in W.
template <class W>
float scale_of(const std::vector<float>& row) {
  float most = 0;
  for (float each : row) most = std::max(most, std::fabs(each));
  return sizeof(W) == 1 ? most / 127 : 1;
}

using reblock::assign;

void assign(int8_t* to, float value) {
  *to = int8_t(std::lround(value));
}

template <class W>
Weight<W> make_weight(int64_t outputs, int64_t inputs) {
  constexpr int64_t kInputs = kInputsOfWord<W>;
  Weight<W> out{outputs, inputs, (inputs + kInputs - 1) / kInputs, {}, {}, {}};
  out.packed.resize((outputs + kPanel - 1) / kPanel * out.words * kPanel * kInputs);
  out.scales.resize(sizeof(W) == 1 ? outputs : 0);
  for (int64_t n = 0; n < outputs; n++) {
    std::vector<float> row = normals<float>(inputs);
    float scale = scale_of<W>(row);
    for (int64_t k = 0; k < inputs; k++) {
      W& to = out.packed[((n / kPanel * out.words + k / kInputs) * kPanel + n % kPanel) * kInputs +
                         k % kInputs];
      assign(&to, row[k] / scale);
      out.exact.push_back(double(to_float(to)) * scale);
    }
    if (sizeof(W) == 1) out.scales[n] = scale;
  }
  return out;
}

template <class X, class W>
std::vector<X> run_linear(const X* x, int64_t rows, const Weight<W>& weight, const float* bias) {
  std::vector<X> y(rows * weight.outputs);
  LinearLayer<X, W> layer{weight.packed.data(),
                          weight.scales.empty() ? nullptr : weight.scales.data(), bias,
                          weight.outputs, y.data()};
  linear<X, W>(x, weight.inputs, rows, weight.words * kInputsOfWord<W>, {layer});
  return y;
}

template <class X, class W>
void check_linear(int64_t rows, int64_t outputs, int64_t inputs) {
  std::string what = "linear, " + std::to_string(rows) + " rows of " + name_of<X>() + ", [" +
                     std::to_string(outputs) + ", " + std::to_string(inputs) + "] in " +
                     name_of<W>();
  Weight<W> weight = make_weight<W>(outputs, inputs);
  std::vector<X> x = normals<X>(rows * inputs);
  std::vector<float> bias = normals<float>(outputs);
  std::vector<X> y = run_linear(x.data(), rows, weight, bias.data());
  for (int64_t m = 0; m < rows; m++)
    for (int64_t n = 0; n < outputs; n++) {
      double sum = bias[n], x_squares = 0, w_squares = 0;
      for (int64_t k = 0; k < inputs; k++) {
        double a = to_float(x[m * inputs + k]), b = weight.exact[n * inputs + k];
        sum += a * b, x_squares += a * a, w_squares += b * b;
      }
      double bound = std::sqrt(x_squares * w_squares) + std::fabs(bias[n]);
      check(std::fabs(to_float(y[m * outputs + n]) - sum), kLinearError<X> * bound, what);
    }
  for (int64_t m : {int64_t(0), rows - 1}) {
    std::vector<X> alone = run_linear(x.data() + m * inputs, 1, weight, bias.data());
    check_same(alone.data(), y.data() + m * outputs, outputs, what + ", a row alone");
  }
}

template <class X, class W>
void check_linears() {
  // Every height of a tile, sizes that fill no vector, and more inputs than are taken at once.
  for (int64_t rows : {1, 2, 3, 4, 5, 17}) {
    check_linear<X, W>(rows, 5, 37);
    check_linear<X, W>(rows, 33, 601);
  }
  check_linear<X, W>(70, 5, 2001);
}

struct Case {
  const char* name;
  int64_t groups, key_size, value_size, tokens;
  std::vector<int64_t> start, lengths;
  int64_t real_rows, length;  // the length of a block, or of a ring
  bool is_ring = false;
  int64_t window = 0;
  float softcap = 0;
  bool has_sinks = false;
  int64_t kv_heads = 2;

  int64_t heads() const { return groups * kv_heads; }
  int64_t rows() const { return int64_t(start.size()); }
  int64_t seen() const { return is_ring ? length : window; }
};

template <class C, class X>
struct Call {
  const Case& of;
  int64_t width, num_places;
  std::vector<X> query, key;    // [B][T][heads][D]: heads and tokens exchanged
  std::vector<X> value;         // [B][K][T][E]
  std::vector<C> keys, values;  // the caches
  std::vector<int64_t> where;   // block tables [B][width], or slots [B]
  std::vector<float> sinks;     // [H]

  explicit Call(const Case& of) : of(of) {
    int64_t rows = of.rows(), last = *std::max_element(of.start.begin(), of.start.end());
    width = of.is_ring ? 1 : (last + of.tokens + of.length - 1) / of.length;
    num_places = rows * width + 1;
    query = normals<X>(rows * of.tokens * of.heads() * of.key_size);
    key = normals<X>(rows * of.tokens * of.kv_heads * of.key_size);
    value = normals<X>(rows * of.kv_heads * of.tokens * of.value_size);
    keys = normals<C>(num_places * of.kv_heads * of.length * of.key_size);
    values = normals<C>(num_places * of.kv_heads * of.length * of.value_size);
    for (int64_t i = 1; i <= rows * width; i++) where.push_back(num_places - i);
    sinks = normals<float>(of.heads());
  }

  // Which key of the cache stands for a position.
  int64_t place(int64_t row, int64_t head, int64_t position) const {
    int64_t index = of.is_ring ? where[row] : where[row * width + position / of.length];
    return (index * of.kv_heads + head) * of.length + position % of.length;
  }

  const X* new_key(int64_t row, int64_t head, int64_t t) const {
    return key.data() + ((row * of.tokens + t) * of.kv_heads + head) * of.key_size;
  }

  const X* new_value(int64_t row, int64_t head, int64_t t) const {
    return value.data() + ((row * of.kv_heads + head) * of.tokens + t) * of.value_size;
  }

  std::vector<X> run(int64_t real_rows) {
    int64_t d = of.key_size, e = of.value_size, heads = of.heads(), kv = of.kv_heads;
    AttentionShape shape{of.rows(), real_rows, of.tokens, heads, kv, d, e,
                         float(1 / std::sqrt(double(d))), of.softcap, of.seen(),
                         of.has_sinks ? sinks.data() : nullptr, of.start.data(),
                         of.lengths.data()};
    Cache<C> cache{keys.data(), values.data(), kv, of.length, d, e, of.is_ring, where.data(),
                   width, nullptr, nullptr, 0};
    Strided<X> queries{query.data(), of.tokens * heads * d, d, heads * d};
    Strided<X> new_keys{key.data(), of.tokens * kv * d, d, kv * d};
    Strided<X> new_values{value.data(), kv * of.tokens * e, of.tokens * e, e};
    std::vector<X> out = normals<X>(of.rows() * of.tokens * heads * e);
    auto attention = of.is_ring ? ring_attention<C, X> : paged_attention<C, X>;
    attention(shape, cache, queries, new_keys, new_values, out.data());
    return out;
  }
};

// The keys, or values, of one row and key-value head up to its last token, as the cache holds them.
template <class C, class X, class New>
std::vector<C> past(const Call<C, X>& call, const std::vector<C>& cache, int64_t size, int64_t row,
                    int64_t head, const New& new_of) {
  int64_t start = call.of.start[row], end = start + call.of.lengths[row];
  std::vector<C> out(end * size);
  for (int64_t p = 0; p < end; p++) {
    if (p < start)
      convert(&out[p * size], &cache[call.place(row, head, p) * size], size);
    else
      convert(&out[p * size], new_of(p - start), size);
  }
  return out;
}

// What the query of one token and head gives, given the keys and values of `past`.
template <class C, class X>
std::vector<double> expected(const Call<C, X>& call, const std::vector<C>& keys,
                             const std::vector<C>& values, int64_t position, int64_t head,
                             const X* query) {
  const Case& of = call.of;
  int64_t seen = of.seen(), first = seen > 0 && position >= seen ? position - seen + 1 : 0;
  std::vector<double> out(of.value_size);
  double total = of.has_sinks ? std::exp(double(call.sinks[head])) : 0;
  for (int64_t p = first; p <= position; p++) {
    double score = 0;
    for (int64_t d = 0; d < of.key_size; d++)
      score += double(to_float(query[d])) * to_float(keys[p * of.key_size + d]);
    score /= std::sqrt(double(of.key_size));
    if (of.softcap > 0) score = of.softcap * std::tanh(score / of.softcap);
    double weight = std::exp(score);
    total += weight;
    for (int64_t e = 0; e < of.value_size; e++)
      out[e] += weight * to_float(values[p * of.value_size + e]);
  }
  for (double& each : out) each /= total;
  return out;
}

// The outputs of a call, [B][T][H][E]; the caches are written as well.
template <class C, class X>
std::vector<double> reference(Call<C, X>& call) {
  const Case& of = call.of;
  int64_t key_size = of.key_size, value_size = of.value_size, heads = of.heads();
  std::vector<double> out(of.rows() * of.tokens * heads * value_size);
  for (int64_t row = 0; row < of.real_rows; row++)
    for (int64_t kv = 0; kv < of.kv_heads; kv++) {
      int64_t start = of.start[row], end = start + of.lengths[row];
      auto new_key = [&](int64_t t) { return call.new_key(row, kv, t); };
      auto new_value = [&](int64_t t) { return call.new_value(row, kv, t); };
      std::vector<C> keys = past(call, call.keys, key_size, row, kv, new_key);
      std::vector<C> values = past(call, call.values, value_size, row, kv, new_value);
      for (int64_t p = start; p < end; p++) {
        int64_t token = row * of.tokens + p - start, at = call.place(row, kv, p);
        for (int64_t h = kv * of.groups; h < (kv + 1) * of.groups; h++) {
          const X* query = &call.query[(token * heads + h) * key_size];
          std::vector<double> of_head = expected(call, keys, values, p, h, query);
          std::copy(of_head.begin(), of_head.end(), &out[(token * heads + h) * value_size]);
        }
        std::copy_n(&keys[p * key_size], key_size, &call.keys[at * key_size]);
        std::copy_n(&values[p * value_size], value_size, &call.values[at * value_size]);
      }
    }
  return out;
}

template <class C, class X>
void check_attention(const Case& of) {
  std::string what = std::string(of.name) + ", " + name_of<X>() + ", cache in " + name_of<C>();
  Call<C, X> call(of), expected_call = call, alone_call = call;
  std::vector<double> expected = reference(expected_call);
  std::vector<X> out = call.run(of.real_rows);
  for (size_t i = 0; i < out.size(); i++)
    check(std::fabs(to_float(out[i]) - expected[i]), kAttentionError<X>, what);
  check_same(call.keys.data(), expected_call.keys.data(), call.keys.size(), what + ", keys");
  check_same(call.values.data(), expected_call.values.data(), call.values.size(),
             what + ", values");
  check_same(alone_call.run(1).data(), out.data(), out.size() / of.rows(), what + ", a row alone");
}

const Case kCases[] = {
    // Few queries: four, two and one of them at once; ranges of keys that threads share.
    {"few", 7, 64, 64, 1, {300, 0, 37}, {1, 1, 1}, 3, 16},
    {"few, narrow", 3, 20, 8, 2, {300, 0, 37}, {2, 1, 1}, 2, 16},
    {"few, a window", 1, 20, 72, 1, {300, 0, 37}, {1, 1, 1}, 3, 7, false, 30},
    {"few, long", 2, 64, 64, 1, {1500, 511, 255}, {1, 1, 1}, 3, 128, false, 0, 3, true},
    {"few, rings", 4, 64, 72, 1, {300, 0, 37}, {1, 1, 1}, 3, 24, true, 0, 0, true},
    {"many", 3, 80, 72, 33, {300, 0, 37}, {33, 7, 20}, 2, 16},
    {"many, all of it", 2, 20, 33, 33, {100, 0, 37}, {9, 33, 20}, 3, 7, false, 30, 3, true},
    {"many, short rings", 3, 64, 20, 33, {100, 0, 37}, {33, 7, 20}, 3, 24, true, 0, 2},
    {"many, rings", 3, 64, 64, 33, {100, 0, 37}, {33, 7, 20}, 3, 64, true, 0, 0, true},
};

}  // namespace

int main() {
  check_linears<float, float>();
  check_linears<float, BFloat16>();
  check_linears<float, int8_t>();
  check_linears<BFloat16, float>();
  check_linears<BFloat16, BFloat16>();
  check_linears<BFloat16, int8_t>();
  for (const Case& of : kCases) {
    check_attention<float, float>(of);
    check_attention<BFloat16, float>(of);
    check_attention<BFloat16, BFloat16>(of);
  }
  std::printf("%d lanes\n", kLanes);
}
