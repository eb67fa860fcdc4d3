// The operators as torch sees them. They are written against torch's stable interface, so that the
// library depends on no torch but one that is new enough.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <optional>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace reblock {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

Tensor packed_in_memory(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Tensor new_like(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, sizes, dtype);
}

const float* floats_or_null(const std::optional<Tensor>& tensor, int64_t count, const char* name) {
  if (!tensor.has_value()) return nullptr;
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous() &&
                      tensor->numel() == count,
                  "reblock: ", name, " must be ", count, " contiguous float32 numbers");
  return pointer<float>(*tensor);
}

// Checks that `packed` is [ceil(N / 16)][ceil(K / inputs of a word)][16][inputs of a word].
void check_packed(const Tensor& packed, int64_t outputs, int64_t inputs) {
  STD_TORCH_CHECK(packed.dim() == 4 && packed.size(2) == kPanel && packed.is_contiguous() &&
                      packed.size(3) * int64_t(packed.element_size()) == 4,
                  "reblock: the weights are not packed");
  STD_TORCH_CHECK(outputs > 0 && packed.size(0) == (outputs + kPanel - 1) / kPanel && inputs > 0 &&
                      packed.size(1) == (inputs + packed.size(3) - 1) / packed.size(3),
                  "reblock: the packed weights are not [", outputs, ", ", inputs, "]");
}

// Calls use(T*) with the type of the tensor's elements.
template <class Use>
void with_float_type(const Tensor& tensor, const char* name, const Use& use) {
  if (tensor.scalar_type() == ScalarType::Float)
    use(pointer<float>(tensor));
  else if (tensor.scalar_type() == ScalarType::BFloat16)
    use(pointer<BFloat16>(tensor));
  else
    STD_TORCH_CHECK(false, "reblock: ", name, " must be float32 or bfloat16");
}

template <class Use>
void with_weight_type(const Tensor& packed, const Use& use) {
  if (packed.scalar_type() == ScalarType::Char)
    use(pointer<int8_t>(packed));
  else
    with_float_type(packed, "packed weights", use);
}

using OptionalTensors = std::vector<std::optional<Tensor>>;

std::vector<Tensor> linears_op(const Tensor& x_any, const std::vector<Tensor>& packed,
                               const OptionalTensors& scales, const OptionalTensors& bias,
                               const std::vector<int64_t>& out_features) {
  size_t count = packed.size();
  STD_TORCH_CHECK(x_any.dim() > 0, "reblock: x has no dimension");
  STD_TORCH_CHECK(count > 0 && scales.size() == count && bias.size() == count &&
                      out_features.size() == count,
                  "reblock: there are ", count, " weights, ", scales.size(), " scales, ",
                  bias.size(), " biases and ", out_features.size(), " numbers of outputs");
  int64_t inputs = x_any.size(x_any.dim() - 1);
  for (size_t i = 0; i < count; i++) {
    check_packed(packed[i], out_features[i], inputs);
    STD_TORCH_CHECK(packed[i].scalar_type() == packed[0].scalar_type(),
                    "reblock: the packed weights must be of one type");
  }
  Tensor x = packed_in_memory(x_any);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  std::vector<Tensor> results;
  for (int64_t outputs : out_features) {
    sizes.back() = outputs;
    results.push_back(new_like(x, sizes, x.scalar_type()));
  }
  with_float_type(x, "x", [&](auto* from) {
    with_weight_type(packed[0], [&](auto* typed) {
      using X = std::remove_pointer_t<decltype(from)>;
      using W = std::remove_pointer_t<decltype(typed)>;
      std::vector<LinearLayer<X, W>> layers;
      for (size_t i = 0; i < count; i++)
        layers.push_back({pointer<W>(packed[i]), floats_or_null(scales[i], out_features[i], "scales"),
                          floats_or_null(bias[i], out_features[i], "bias"), out_features[i],
                          pointer<X>(results[i])});
      linear<X, W>(from, inputs, x.numel() / inputs, packed[0].size(1) * packed[0].size(3), layers);
    });
  });
  return results;
}

Tensor linear_op(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                 const std::optional<Tensor>& bias, int64_t out_features) {
  return linears_op(x, {packed}, {scales}, {bias}, {out_features})[0];
}

Tensor embedding_op(const Tensor& ids_any, const Tensor& packed,
                    const std::optional<Tensor>& scales, int64_t num_embeddings, int64_t size,
                    ScalarType dtype) {
  check_packed(packed, num_embeddings, size);
  STD_TORCH_CHECK(ids_any.scalar_type() == ScalarType::Long, "reblock: ids must be int64");
  Tensor ids = packed_in_memory(ids_any);
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(size);
  Tensor y = new_like(ids, sizes, dtype);
  const float* scale = floats_or_null(scales, num_embeddings, "scales");
  const int64_t *id = pointer<int64_t>(ids), count = ids.numel(), words = packed.size(1);
  for (int64_t i = 0; i < count; i++)
    STD_TORCH_CHECK(id[i] >= 0 && id[i] < num_embeddings, "reblock: there is no token ", id[i]);
  with_float_type(y, "embeddings", [&](auto* out) {
    with_weight_type(packed, [&](auto* weights) {
      constexpr int kInputs = kInputsOfWord<std::remove_pointer_t<decltype(weights)>>;
      share_out(count, [&](int64_t i) {
        auto* from = weights + (id[i] / kPanel * words * kPanel + id[i] % kPanel) * kInputs;
        float factor = scale == nullptr ? 1.0f : scale[id[i]];
        for (int64_t k = 0; k < size; k++)
          assign(out + i * size + k,
                 to_float(from[k / kInputs * kPanel * kInputs + k % kInputs]) * factor);
      });
    });
  });
  return y;
}

// So far from the end of the integers that the positions of a row's tokens are integers, too.
constexpr int64_t kLastStart = std::numeric_limits<int64_t>::max() / 2;

// The tensors of an attention call, and what is checked before any memory is touched.
struct Call {
  const Tensor &query, &key, &value, &key_cache, &value_cache;
  const Tensor &where, &start, &num_tokens, &num_rows;

  AttentionShape shape(double scale, double softcap, int64_t window,
                       const std::optional<Tensor>& sinks) const {
    AttentionShape s;
    s.rows = query.size(0), s.tokens = query.size(2), s.heads = query.size(1);
    s.kv_heads = key.size(1), s.key_size = key.size(3), s.value_size = value.size(3);
    s.scale = float(scale), s.softcap = float(softcap), s.window = window;
    s.sinks = floats_or_null(sinks, s.heads, "sinks");
    s.start = pointer<int64_t>(start), s.lengths = pointer<int64_t>(num_tokens);
    int64_t real = *pointer<int64_t>(num_rows);
    STD_TORCH_CHECK(real >= 1 && real <= s.rows, "reblock: ", real, " real rows of ", s.rows);
    s.real_rows = real;
    for (int64_t row = 0; row < real; row++) {
      STD_TORCH_CHECK(s.start[row] >= 0 && s.lengths[row] >= 1 && s.lengths[row] <= s.tokens,
                      "reblock: row ", row, " has ", s.lengths[row], " of ", s.tokens, " tokens");
      STD_TORCH_CHECK(s.start[row] <= kLastStart, "reblock: row ", row, " starts at ", s.start[row],
                      ", past the last position that can be counted");
    }
    return s;
  }

  void check() const {
    for (const Tensor* each : {&query, &key, &value, &key_cache, &value_cache})
      STD_TORCH_CHECK(each->dim() == 4, "reblock: attention takes tensors of four dimensions");
    STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() &&
                        value.scalar_type() == query.scalar_type() &&
                        value_cache.scalar_type() == key_cache.scalar_type(),
                    "reblock: queries, keys and values must be of one type");
    STD_TORCH_CHECK(key.size(1) > 0 && key_cache.size(2) > 0,
                    "reblock: there are ", key.size(1), " heads of keys and ", key_cache.size(2),
                    " positions in a block");
    STD_TORCH_CHECK(query.size(3) == key.size(3) && query.size(1) % key.size(1) == 0 &&
                        query.size(0) == key.size(0) && query.size(2) == key.size(2),
                    "reblock: queries and keys do not go together");
    STD_TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous() &&
                        key_cache.size(1) == key.size(1) && key_cache.size(3) == key.size(3) &&
                        value_cache.size(3) == value.size(3) &&
                        value_cache.size(2) == key_cache.size(2) &&
                        value_cache.size(0) == key_cache.size(0),
                    "reblock: the cache is not one of such keys and values");
    for (const Tensor* each : {&where, &start, &num_tokens, &num_rows})
      STD_TORCH_CHECK(each->scalar_type() == ScalarType::Long && each->is_contiguous(),
                      "reblock: places must be contiguous int64");
    STD_TORCH_CHECK(where.size(0) == query.size(0) && start.numel() == query.size(0) &&
                        num_tokens.numel() == query.size(0) && num_rows.numel() == 1,
                    "reblock: places are not those of the rows");
  }
};

void check_places(const AttentionShape& shape, const int64_t* where, int64_t width, int64_t length,
                  int64_t num_places) {
  for (int64_t row = 0; row < shape.real_rows; row++) {
    int64_t last = shape.start[row] + shape.lengths[row] - 1;
    int64_t used = length == 0 ? 1 : last / length + 1;
    STD_TORCH_CHECK(used <= width, "reblock: row ", row, " needs ", used, " blocks of ", width);
    for (int64_t i = 0; i < used; i++) {
      int64_t place = where[row * width + i];
      STD_TORCH_CHECK(place >= 0 && place < num_places, "reblock: there is no place ", place);
    }
  }
}

template <class T>
Strided<T> strided(const Tensor& tensor) {
  return {pointer<T>(tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Tensor rows_in_memory(const Tensor& tensor) {
  return tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

Tensor run_attention(const Call& call, const AttentionShape& shape, bool is_ring) {
  Tensor query = rows_in_memory(call.query), key = rows_in_memory(call.key);
  Tensor value = rows_in_memory(call.value);
  Tensor out = new_like(query, {shape.rows, shape.tokens, shape.heads, shape.value_size},
                        query.scalar_type());
  with_float_type(query, "queries", [&](auto* typed) {
    with_float_type(call.key_cache, "the cache", [&](auto* keys) {
      using X = std::remove_pointer_t<decltype(typed)>;
      using C = std::remove_pointer_t<decltype(keys)>;
      Cache<C> cache{keys, pointer<C>(call.value_cache), shape.kv_heads, call.key_cache.size(2),
                     shape.key_size, shape.value_size, is_ring, pointer<int64_t>(call.where),
                     is_ring ? 1 : call.where.size(1), nullptr, nullptr, 0};
      auto run = is_ring ? ring_attention<C, X> : paged_attention<C, X>;
      run(shape, cache, strided<X>(query), strided<X>(key), strided<X>(value), pointer<X>(out));
    });
  });
  return out;
}

Tensor paged_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& key_cache, const Tensor& value_cache,
                          const Tensor& block_tables, const Tensor& start, const Tensor& num_tokens,
                          const Tensor& num_rows, double scale, double softcap, int64_t window,
                          const std::optional<Tensor>& sinks) {
  Call call{query, key, value, key_cache, value_cache, block_tables, start, num_tokens, num_rows};
  call.check();
  STD_TORCH_CHECK(block_tables.dim() == 2, "reblock: block tables must have two dimensions");
  AttentionShape shape = call.shape(scale, softcap, window, sinks);
  check_places(shape, pointer<int64_t>(block_tables), block_tables.size(1), key_cache.size(2),
               key_cache.size(0));
  return run_attention(call, shape, false);
}

Tensor ring_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots,
                         const Tensor& start, const Tensor& num_tokens, const Tensor& num_rows,
                         double scale, double softcap, const std::optional<Tensor>& sinks) {
  Call call{query, key, value, key_cache, value_cache, slots, start, num_tokens, num_rows};
  call.check();
  AttentionShape shape = call.shape(scale, softcap, key_cache.size(2), sinks);
  check_places(shape, pointer<int64_t>(slots), 1, 0, key_cache.size(0));
  return run_attention(call, shape, true);
}

}  // namespace
}  // namespace reblock

// Their signatures are in ops.py, so that a model can be exported before this is built.
STABLE_TORCH_LIBRARY_IMPL(reblock, CPU, library) {
  library.impl("linear", TORCH_BOX(&reblock::linear_op));
  library.impl("linears", TORCH_BOX(&reblock::linears_op));
  library.impl("embedding", TORCH_BOX(&reblock::embedding_op));
  library.impl("paged_attention", TORCH_BOX(&reblock::paged_attention_op));
  library.impl("ring_attention", TORCH_BOX(&reblock::ring_attention_op));
}
