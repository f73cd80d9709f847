// decode_attention and attention_pair, on the CPU.
#include <optional>
#include <vector>

#include "bindings/tensors.h"

namespace icl_patch {
namespace {

// The keys that each row sees: their numbers, and how many they are.
void list_visible(const Tensor& mask, int64_t rows, int64_t keys, std::vector<int32_t>& visible,
                  std::vector<int64_t>& counts) {
  const auto* flags = static_cast<const bool*>(mask.const_data_ptr());
  visible.resize(rows * keys);
  for (int64_t row = 0; row < rows; ++row) {
    int32_t* to = visible.data() + row * keys;
    int64_t count = 0;
    for (int64_t k = 0; k < keys; ++k) {
      to[count] = static_cast<int32_t>(k);
      count += flags[row * mask.stride(0) + k * mask.stride(1)];
    }
    counts[row] = count;
  }
}

// y (all, H, E), of which the rows of `query` are filled; `call` is what ran.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, double scale,
              const std::optional<Tensor>& mask, int64_t all, Attention& call) {
  check("query", query, query, {-1, -1, -1});
  const int64_t rows = query.size(0), heads = query.size(1), d = query.size(2);
  check("key", key, query, {rows, -1, -1, d});
  const int64_t groups = key.size(1), keys = key.size(2);
  check("value", value, query, {rows, groups, keys, -1});
  STD_TORCH_CHECK(groups ? heads % groups == 0 : heads == 0, "expected a multiple of ", groups,
                  " query heads, got ", heads);
  STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() &&
                      value.scalar_type() == query.scalar_type(),
                  "expected query, key and value of one dtype");
  call.heads = heads;
  call.groups = groups;
  call.keys = keys;
  call.d = d;
  call.e = value.size(3);
  call.query = {query.const_data_ptr(), dtype_of("query", query), query.stride(1),
                query.stride(2)};
  call.query_row = query.stride(0);
  call.key = {key.const_data_ptr(), dtype_of("key", key), key.stride(2), key.stride(3)};
  call.key_row = key.stride(0);
  call.key_group = key.stride(1);
  call.value = {value.const_data_ptr(), dtype_of("value", value), value.stride(2),
                value.stride(3)};
  call.value_row = value.stride(0);
  call.value_group = value.stride(1);
  call.scale = static_cast<float>(scale);
  std::vector<int64_t> counts(rows, keys);
  std::vector<int32_t> visible;
  if (mask) {
    check("mask", *mask, query, {rows, keys});
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "expected a mask of bools");
    list_visible(*mask, rows, keys, visible, counts);
    call.visible = visible.data();
  }
  call.counts = counts.data();
  call.parts = (keys + Attention::kPart - 1) / Attention::kPart;
  Tensor y = allocate(query, {all, heads, call.e}, query.scalar_type(), call.y);
  std::vector<float> partial(rows * heads * call.parts * (call.e + 2));
  call.partial = partial.data();
  // Rows see different numbers of keys: without the empty parts the threads share the work evenly.
  std::vector<int64_t> items;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t part = 0; part * Attention::kPart < counts[row]; ++part)
        items.push_back((row * groups + group) * call.parts + part);
  call.items = items.data();
  run_rows(&CpuDriver::attention_parts, call, items.size(), 2 * Attention::kPart * (d + call.e));
  run_rows(&CpuDriver::attention_outputs, call, rows * heads, call.parts * call.e);
  return y;
}

Tensor decode_attention(const Tensor& query, const Tensor& key, const Tensor& value, double scale,
                        std::optional<Tensor> mask) {
  Attention call;
  return attend(query, key, value, scale, mask, query.size(0), call);
}

// The values (G, E) in column `slot`, for all heads, into the rows behind those of attend().
template <class T>
void copy_own_values(const Tensor& value, int64_t slot, const Attention& call) {
  const int64_t rows = value.size(0), shared = call.groups ? call.heads / call.groups : 0;
  const T* from = static_cast<const T*>(value.const_data_ptr()) + slot * value.stride(2);
  T* to = static_cast<T*>(call.y) + rows * call.heads * call.e;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < call.heads; ++head, to += call.e) {
      const T* own = from + row * value.stride(0) + head / shared * value.stride(1);
      for (int64_t i = 0; i < call.e; ++i) to[i] = own[i * value.stride(3)];
    }
}

Tensor attention_pair(const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& slot, double scale, std::optional<Tensor> mask) {
  check("slot", slot, query, {1});
  STD_TORCH_CHECK(slot.scalar_type() == ScalarType::Long, "expected slot in int64");
  const int64_t own = *static_cast<const int64_t*>(slot.const_data_ptr());
  Attention call;
  Tensor y = attend(query, key, value, scale, mask, 2 * query.size(0), call);
  STD_TORCH_CHECK(0 <= own && own < call.keys, "expected slot from 0 to ", call.keys - 1, ", got ",
                  own);
  if (query.scalar_type() == ScalarType::Float)
    copy_own_values<float>(value, own, call);
  else
    copy_own_values<uint16_t>(value, own, call);
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  ICL_PATCH_IMPL(decode_attention);
  ICL_PATCH_IMPL(attention_pair);
}
