// The stable update of one row: g and m of the inversion from delta, scale and h_down, written once
// for the CPU and the CUDA driver; icl_patch/ops/stable_update.py has the formula.
//
// Beside what the inversion asks of a Row:
//     at.scale(), at.delta()        the coordinate's scale and delta; fallback() is its h_down
//     row.set_update(update)        m() and g() are those of the update from now on
#pragma once

#include "common/rmsnorm_inverse.h"

namespace icl_patch {

// The least size of an m, as a part of the scale's RMS.
constexpr double kScaleFloor = 0.25;

// g = delta + scale ⊙ Norm(h), and m, the scale with no number smaller than `floor`.
struct Update {
  double inverse_norm = 0, floor = 0;

  template <class V>
  ICL_PATCH_INLINE V g(V delta, V scale, V h) const {
    return delta + scale * (h * inverse_norm);
  }
  template <class V>
  ICL_PATCH_INLINE V m(V scale) const {
    return select(magnitude(scale) < floor, select(scale < 0.0, V{-floor}, V{floor}), scale);
  }
};

template <class V>
struct UpdateSums {
  V h{}, m{}, delta{}, smallest{kInfinity};  // Σ h², Σ m², Σ |delta|, min |m|

  ICL_PATCH_INLINE void merge(const UpdateSums& other) {
    h += other.h;
    m += other.m;
    delta += other.delta;
    smallest = smaller(smallest, other.smallest);
  }
};

template <class Row>
ICL_PATCH_INLINE Outcome update_row(Row& row, int64_t n, double eps) {
  using V = typename Row::Value;
  const auto sums = row.template sum_inputs<UpdateSums>([](auto& sum, const auto& at) {
    const V h = at.fallback(), m = at.scale();
    sum.h += h * h;
    sum.m += m * m;
    sum.delta += magnitude(at.delta());
    sum.smallest = smaller(sum.smallest, magnitude(m));
  });
  if (sums.delta == 0) {
    row.store_unchanged();
    return {0, 0, kEasy};
  }
  const double mean = sums.h / n;
  Update update;
  update.inverse_norm = mean + eps > 0 ? 1 / std::sqrt(mean + eps) : 0;
  double size = sums.m;
  if (size == 0) {  // all scales are 0: the size of g serves
    const auto g = row.template sum_inputs<Sum>([=](auto& sum, const auto& at) {
      const V target = update.g(at.delta(), at.scale(), at.fallback());
      sum.value += target * target;
    });
    size = g.value;
  }
  update.floor = kScaleFloor * std::sqrt(size / n);
  row.set_update(update);
  // h = 0 has no RMS to preserve, so any radius will do.
  const Radius radius{mean > 0 ? std::sqrt(mean) : 1, eps};
  if constexpr (Row::kNarrow) {  // the sums do not overflow, and g needs no power of two
    const double nonfinite = zero_if_finite(sums.h + sums.m + sums.delta);
    return invert_row(row, n, radius, {larger(sums.smallest, update.floor), 1, nonfinite});
  } else {
    return invert_row(row, n, radius, extent_of(row));
  }
}

}  // namespace icl_patch
