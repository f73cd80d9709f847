// decode_attention, attention_pair and write_and_attend, on the CPU.
#include <cstring>
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

// Checks the arguments, and describes the call by them; query is (B, H, D) or (B, H, 1, D).
Attention described(const Tensor& query, const Tensor& key, const Tensor& value, double scale,
                    const std::optional<Tensor>& mask) {
  const int64_t last = query.dim() - 1;
  const int64_t rows = query.size(0), heads = query.size(1), d = query.size(last);
  check("key", key, query, {rows, -1, -1, d});
  const int64_t groups = key.size(1), keys = key.size(2);
  check("value", value, query, {rows, groups, keys, -1});
  STD_TORCH_CHECK(groups ? heads % groups == 0 : heads == 0, "expected a multiple of ", groups,
                  " query heads, got ", heads);
  STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() &&
                      value.scalar_type() == query.scalar_type(),
                  "expected query, key and value of one dtype");
  if (mask) {
    check("mask", *mask, query, {rows, keys});
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, "expected a mask of bools");
  }
  Attention call;
  call.heads = heads;
  call.groups = groups;
  call.keys = keys;
  call.d = d;
  call.e = value.size(3);
  call.query = {query.const_data_ptr(), dtype_of("query", query), query.stride(1),
                query.stride(last)};
  call.query_row = query.stride(0);
  call.key = {key.const_data_ptr(), dtype_of("key", key), key.stride(2), key.stride(3)};
  call.key_row = key.stride(0);
  call.key_group = key.stride(1);
  call.value = {value.const_data_ptr(), dtype_of("value", value), value.stride(2),
                value.stride(3)};
  call.value_row = value.stride(0);
  call.value_group = value.stride(1);
  call.scale = static_cast<float>(scale);
  return call;
}

// Fills the first B rows of y, of which each has H E elements.
void attend(Attention& call, int64_t rows, const std::optional<Tensor>& mask) {
  const int64_t heads = call.heads, groups = call.groups, keys = call.keys;
  std::vector<int64_t> counts(rows, keys);
  std::vector<int32_t> visible;
  if (mask) {
    list_visible(*mask, rows, keys, visible, counts);
    call.visible = visible.data();
  }
  call.counts = counts.data();
  call.parts = (keys + Attention::kPart - 1) / Attention::kPart;
  std::vector<float> partial(rows * heads * call.parts * (call.e + 2));
  call.partial = partial.data();
  // Rows see different numbers of keys: without the empty parts the threads share the work evenly.
  std::vector<int64_t> items;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t part = 0; part * Attention::kPart < counts[row]; ++part)
        items.push_back((row * groups + group) * call.parts + part);
  call.items = items.data();
  run_rows(&CpuDriver::attention_parts, call, items.size(),
           2 * Attention::kPart * (call.d + call.e));
  run_rows(&CpuDriver::attention_outputs, call, rows * heads, call.parts * call.e);
}

Tensor decode_attention(const Tensor& query, const Tensor& key, const Tensor& value, double scale,
                        std::optional<Tensor> mask) {
  check("query", query, query, {-1, -1, -1});
  Attention call = described(query, key, value, scale, mask);
  Tensor y = allocate(query, {query.size(0), call.heads, call.e}, query.scalar_type(), call.y);
  attend(call, query.size(0), mask);
  return y;
}

// The tokens' own values (B, G, E), which begin at element `first` of a tensor.
struct OwnValues {
  const Tensor& in;
  int64_t first, row, group, element;  // strides
};

// The own values, for all heads, into the rows behind those of attend().
template <class T>
void copy_own_values(const OwnValues& values, int64_t rows, const Attention& call) {
  const int64_t shared = call.groups ? call.heads / call.groups : 0;
  const T* from = static_cast<const T*>(values.in.const_data_ptr()) + values.first;
  T* to = static_cast<T*>(call.y) + rows * call.heads * call.e;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < call.heads; ++head, to += call.e) {
      const T* own = from + row * values.row + head / shared * values.group;
      for (int64_t i = 0; i < call.e; ++i) to[i] = own[i * values.element];
    }
}

// The column of the token's own key and value.
int64_t column_of(const Tensor& slot, const Tensor& query, int64_t keys) {
  check("slot", slot, query, {1});
  STD_TORCH_CHECK(slot.scalar_type() == ScalarType::Long, "expected slot in int64");
  const int64_t own = *static_cast<const int64_t*>(slot.const_data_ptr());
  STD_TORCH_CHECK(0 <= own && own < keys, "expected slot from 0 to ", keys - 1, ", got ", own);
  return own;
}

// The attention of both streams into y, which has 2 B H E elements.
void attend_both(Attention& call, int64_t rows, const OwnValues& own,
                 const std::optional<Tensor>& mask) {
  attend(call, rows, mask);
  if (own.in.scalar_type() == ScalarType::Float)
    copy_own_values<float>(own, rows, call);
  else
    copy_own_values<uint16_t>(own, rows, call);
}

Tensor attention_pair(const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& slot, double scale, std::optional<Tensor> mask) {
  check("query", query, query, {-1, -1, -1});
  Attention call = described(query, key, value, scale, mask);
  const int64_t column = column_of(slot, query, call.keys);
  Tensor y = allocate(query, {2 * query.size(0), call.heads, call.e}, query.scalar_type(), call.y);
  const OwnValues own{value, column * value.stride(2), value.stride(0), value.stride(1),
                      value.stride(3)};
  attend_both(call, query.size(0), own, mask);
  return y;
}

// Copies x, whose elements lie `group` and `element` apart in a row, into the column `slot` of a
// cache (B, G, S, ·).
void write_column(const Tensor& cache, const Tensor& x, int64_t group, int64_t element,
                  int64_t slot) {
  const int64_t size = cache.scalar_type() == ScalarType::Float ? 4 : 2, width = cache.size(3);
  const int64_t to_element = cache.stride(3);
  char* to = static_cast<char*>(cache.mutable_data_ptr()) + slot * cache.stride(2) * size;
  const char* from = static_cast<const char*>(x.const_data_ptr());
  for (int64_t row = 0; row < cache.size(0); ++row)
    for (int64_t g = 0; g < cache.size(1); ++g) {
      char* y = to + (row * cache.stride(0) + g * cache.stride(1)) * size;
      const char* z = from + (row * x.stride(0) + g * group) * size;
      if (element == 1 && to_element == 1) {
        memcpy(y, z, width * size);
        continue;
      }
      for (int64_t i = 0; i < width; ++i)
        memcpy(y + i * to_element * size, z + i * element * size, size);
    }
}

// An expanded tensor has several elements in one place: all of them would be written.
void check_not_expanded(const char* name, const Tensor& x) {
  for (int64_t i = 0; i < x.dim(); ++i)
    STD_TORCH_CHECK(x.size(i) < 2 || x.stride(i), "expected ", name,
                    " of which each element has its own memory, got an expanded tensor");
}

Tensor write_and_attend(const Tensor& query, const Tensor& keys, const Tensor& values,
                        const Tensor& key, const Tensor& value, const Tensor& slot, double scale,
                        std::optional<Tensor> mask) {
  check("query", query, query, {-1, -1, 1, -1});
  Attention call = described(query, keys, values, scale, mask);
  const int64_t rows = query.size(0);
  check_not_expanded("keys", keys);
  check_not_expanded("values", values);
  check("key", key, query, {rows, call.groups, 1, call.d});
  check("value", value, query, {-1, call.groups * call.e});
  STD_TORCH_CHECK(value.size(0) == rows || value.size(0) == 2 * rows, "expected value of ", rows,
                  " or ", 2 * rows, " rows, got ", value.size(0));
  STD_TORCH_CHECK(key.scalar_type() == query.scalar_type() &&
                      value.scalar_type() == query.scalar_type(),
                  "expected key and value in query's dtype");
  STD_TORCH_CHECK(call.heads >= call.groups, "expected ", call.groups,
                  " query heads or more, got ", call.heads);
  const int64_t column = column_of(slot, query, call.keys);
  Tensor y = allocate(query, {2 * rows, call.heads * call.e}, query.scalar_type(), call.y);
  const OwnValues own{value, (value.size(0) - rows) * value.stride(0), value.stride(0),
                      call.e * value.stride(1), value.stride(1)};
  write_column(keys, key, key.stride(1), key.stride(3), column);
  write_column(values, value, own.group, own.element, column);
  attend_both(call, rows, own, mask);
  return y;
}

}  // namespace
}  // namespace icl_patch

STABLE_TORCH_LIBRARY_IMPL(icl_patch, CPU, m) {
  ICL_PATCH_IMPL(decode_attention);
  ICL_PATCH_IMPL(attention_pair);
  ICL_PATCH_IMPL(write_and_attend);
}
