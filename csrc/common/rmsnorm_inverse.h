// Inverting RMSNorm, one row: the mathematics, written once for the CPU and the CUDA driver.
//
// Given g, m and the radius r, find y with ‖y‖² = N = n r² that minimises ‖m ⊙ y - g‖². With
// a = |m|, p = a|g|, e = (a - min a)(a + min a) and s = min m² - μ ≥ 0 the condition is the secular
// equation
//
//     φ(s) = Σ (p/(e + s))² = N,    y = ± p/(e + s),    m' = (e + s)/m
//
// (Goldwaser et al. 2025, Appendix B.2). Its root is found by two-point Gauss quadrature. φ is an
// integral ∫ dρ(q)/(1 + q(x - s))² over q = 1/(e + s). The first four moments of ρ, summed in one
// pass over the row, give two nodes and weights, and so a function that agrees with φ in its value
// and three derivatives. The integrand's even derivatives are positive, so this model lies below φ
// and its root never lies beyond φ's.
//
// A driver supplies a Row:
//     Row::Value                    double, or a vector of them with its own select()
//     row.sum_inputs<S>(f)          S<double>: f(S<Value>&, at) for every coordinate, merged in a
//                                   fixed tree. `at` has m(), g(), fallback() and index()
//     row.sum_terms<S>(f)           the same for the sums of every evaluation: `at` has e() and p()
//     row.set_scale(power)          multiplies m and g by a power of two from now on
//     row.prepare_terms<S>(smallest, f)  sum_inputs; afterwards e() and p() are those of `term`
//     row.sum_terms_once<S>(f, g)   g(the sums), computed once for all threads of the row
//     Row::kNarrow                  whether all inputs are of fp32's range
//     row.is_fp64()                 whether hidden is stored in fp64
//     at.store(hidden, new_scale)   returns 0 if both are finite as stored, else NaN
//     row.store_unchanged()         stores hidden = 0 and the scale as it was given
//     row.store_nan()               stores NaN
#pragma once

#include <cmath>

#include "common/matrix.h"

namespace icl_patch {

constexpr double kUlp = 0x1p-52;
constexpr double kInfinity = __builtin_huge_val();
constexpr int32_t kMaxEvaluations = 64;

enum Status : int8_t { kEasy, kHard, kUnreachable, kNonfinite, kBadRadius, kNoConvergence };

ICL_PATCH_INLINE double select(bool condition, double x, double y) { return condition ? x : y; }

template <class V>
ICL_PATCH_INLINE V magnitude(V x) {
  return select(x < 0.0, -x, x);
}

ICL_PATCH_INLINE double magnitude(double x) { return std::fabs(x); }  // no instruction on a GPU

template <class V>
ICL_PATCH_INLINE V larger(V x, V y) {
  return select(x > y, x, y);
}

template <class V>
ICL_PATCH_INLINE V smaller(V x, V y) {
  return select(x < y, x, y);
}

template <class V>
ICL_PATCH_INLINE V zero_if_finite(V x) {  // else NaN
  return x - x;
}

// m² - min m² without the cancellation.
template <class V>
ICL_PATCH_INLINE V distance(V m, double smallest) {
  const V a = magnitude(m);
  return (a - smallest) * (a + smallest);
}

// One coordinate of the sums.
template <class V>
struct Term {
  V e_, p_;

  ICL_PATCH_INLINE V e() const { return e_; }
  ICL_PATCH_INLINE V p() const { return p_; }
};

// e = 1 and p = 0 where the coordinate adds nothing (p = 0) or stands at the pole (e = 0), which is
// summed apart.
template <class V>
ICL_PATCH_INLINE Term<V> term(V m, V g, double smallest) {
  const V e = distance(m, smallest), p = magnitude(m) * magnitude(g);
  const auto counts = (p > 0.0) & (e > 0.0);
  return {select(counts, e, V{1}), select(counts, p, V{})};
}

// ---- sums over a row; every struct holds nothing but its values ----

template <class V>
struct Extent {
  V smallest{kInfinity}, largest{}, nonfinite{};

  ICL_PATCH_INLINE void add(V m, V g) {
    const V a = magnitude(m);
    smallest = smaller(smallest, a);
    largest = larger(largest, larger(a, magnitude(g)));
    nonfinite += zero_if_finite(m) + zero_if_finite(g);
  }
  ICL_PATCH_INLINE void merge(const Extent& other) {
    smallest = smaller(smallest, other.smallest);
    largest = larger(largest, other.largest);
    nonfinite += other.nonfinite;
  }
};

template <class V>
struct Weights {
  V squares{}, weighted_distance{}, pole{}, far{}, nearest{kInfinity};

  ICL_PATCH_INLINE void merge(const Weights& other) {
    squares += other.squares;
    weighted_distance += other.weighted_distance;
    pole += other.pole;
    far = larger(far, other.far);
    nearest = smaller(nearest, other.nearest);
  }
};

template <class V>
struct Sum {
  V value{};

  ICL_PATCH_INLINE void merge(const Sum& other) { value += other.value; }
};

// Σ w, Σ w q, Σ w q², Σ w q³ with w = (p/(e + s))² and q = σ/(e + s) ≤ 1.
template <class V>
struct Moments {
  V m0{}, m1{}, m2{}, m3{};

  ICL_PATCH_INLINE void add(V e, V p, double s, double sigma) {
    const V inverse = 1.0 / (e + s);
    const V q = sigma * inverse;
    V w = p * inverse;
    w *= w;
    m0 += w;
    w *= q;
    m1 += w;
    w *= q;
    m2 += w;
    m3 += w * q;
  }
  ICL_PATCH_INLINE void merge(const Moments& other) {
    m0 += other.m0;
    m1 += other.m1;
    m2 += other.m2;
    m3 += other.m3;
  }
};

// The coordinates at the pole: the largest entries of g and the fallback there, whether the
// fallback can be used, and the first of them.
template <class V>
struct PoleShare {
  V largest_g{}, largest_fallback{}, unusable{}, first{kInfinity};

  ICL_PATCH_INLINE void merge(const PoleShare& other) {
    largest_g = larger(largest_g, other.largest_g);
    largest_fallback = larger(largest_fallback, other.largest_fallback);
    unusable += other.unusable;
    first = smaller(first, other.first);
  }
};

template <class V>
struct Faults {
  V unreachable{}, nonfinite{};

  ICL_PATCH_INLINE void merge(const Faults& other) {
    unreachable += other.unreachable;
    nonfinite += other.nonfinite;
  }
};

// ---- the secular equation ----

struct Secular {
  double target;   // N
  double pole;     // Σ p² where e = 0
  double nearest;  // the smallest e with p > 0; 0 if pole > 0
  double lo, hi;   // bracket of the root
};

struct Root {
  double s;
  int32_t evaluations;
  bool converged;
};

// The root t > floor of m0 (w₁/(1 + x₁t)² + w₂/(1 + x₂t)²) = N, with the nodes x and weights w of
// two-point Gauss quadrature.
ICL_PATCH_INLINE double gauss_step(const Moments<double>& moments, double target, double floor) {
  const double mean = moments.m1 / moments.m0, second = moments.m2 / moments.m0;
  const double third = moments.m3 / moments.m0;
  const double variance = second - mean * mean;
  double x1 = mean, x2 = mean, w1 = 1;
  if (variance > 1e-13 * mean * mean) {
    const double skew = 0.5 * (third - 3 * mean * second + 2 * mean * mean * mean) / variance;
    const double reach = std::sqrt(skew * skew + variance);
    x1 = mean + (skew > 0 ? skew + reach : variance / (reach - skew));
    x2 = mean - (skew > 0 ? variance / (reach + skew) : reach - skew);
    x1 = x1 < 1 ? x1 : 1;  // nodes are values of q
    x2 = x2 > 0 ? x2 : 0;
    w1 = (mean - x2) / (x1 - x2);
  }
  // Newton's method on the reciprocal root of the sum, which is concave. It begins at the root for
  // one node at the mean, which by Jensen's inequality lies left of the sum's.
  const double ratio = std::sqrt(moments.m0 / target);
  double t = (ratio - 1) / mean;
  t = t > floor ? t : floor;
  // A step has one square root and one reciprocal, and neither waits for the other: on a GPU one
  // thread takes these steps while the row's others wait.
  const double w2 = 1 - w1;
  for (int step = 0; step < 30; ++step) {
    const double d1 = 1 + x1 * t, d2 = 1 + x2 * t;
    const double value = w1 * d2 * d2 + w2 * d1 * d1;  // of the sum, times (d1 d2)²
    const double inverse = 1 / (w1 * x1 * d2 * d2 * d2 + w2 * x2 * d1 * d1 * d1);
    const double change = (ratio * std::sqrt(value) - d1 * d2) * (value * inverse);
    if (!(std::fabs(change) < kInfinity)) break;  // cubes beyond fp64's range
    t += change;
    if (!(change > 0x1p-26 * std::fabs(t))) break;  // the next one would be below rounding
  }
  return t;
}

// The first s: μ = 0 if the bracket allows it, which is near the root where the norm's output
// changes little.
ICL_PATCH_INLINE double first_guess(const Secular& f, double smallest) {
  const double unshifted = smallest * smallest;
  if (unshifted >= f.lo) return smaller(unshifted, f.hi);
  return f.lo > 0 && f.hi > 16 * f.lo ? std::sqrt(f.lo) * std::sqrt(f.hi) : f.lo;
}

// Where an evaluation leads.
struct Next {
  double s;
  bool done;
};

// The search for the root, which the threads that see the sums lead.
struct Search {
  Secular f;
  double width;

  // From the sums at s to the next s.
  ICL_PATCH_INLINE Next advance(double s, Moments<double> sums) {
    const double sigma = s + f.nearest, beyond = sums.m0;
    if (f.pole > 0) {
      const double at_pole = f.pole / (s * s);
      sums.merge({at_pole, at_pole, at_pole, at_pole});
    }
    const double excess = sums.m0 / f.target - 1;
    if (std::fabs(excess) <= 8 * kUlp) return {s, true};
    if (excess > 0) {
      // Below nearest * kUlp φ does not change, and a bracket from 0 cannot be cut in its exponent.
      f.lo = larger(f.lo, larger(s, f.nearest * kUlp));
      if (f.pole > 0 && beyond < f.target)
        f.hi = smaller(f.hi, std::sqrt(f.pole / (f.target - beyond)) * (1 + 16 * kUlp));
    } else {
      f.hi = smaller(f.hi, s);
    }
    const double step = sigma * gauss_step(sums, f.target, larger((f.lo - s) / sigma, 0x1p-40 - 1));
    // The model leaves out fourth-order terms: at most 10 (step/σ)⁴ of φ, less than 2⁻⁵² here.
    if (f.lo < s + step && s + step < f.hi && std::fabs(step) <= 0x1p-14 * sigma)
      return {s + step, true};
    const double next = smaller(larger(s + step, f.lo), f.hi);
    if (std::fabs(next - s) <= 2 * kUlp * s) return {next, true};
    // The model does not reach across decades, and it climbs nested plateaus one at a time. In both
    // cases cut the bracket in its exponent.
    const double left = next > 0 ? f.hi / next : kInfinity;
    const bool slow =
        left > 20 && left > std::sqrt(width) && left < kInfinity && (excess < 0 || next > 16 * s);
    const double quarter = std::sqrt(std::sqrt(left));
    width = left;
    return {slow ? next * quarter * std::sqrt(quarter) : next, false};
  }
};

template <class Row>
ICL_PATCH_INLINE Root find_root(const Row& row, const Secular& f, double start) {
  Search search{f, f.lo > 0 ? f.hi / f.lo : kInfinity};
  Next next{start, false};
  for (int32_t evaluations = 1; evaluations <= kMaxEvaluations; ++evaluations) {
    const double s = next.s, sigma = s + f.nearest;
    next = row.template sum_terms_once<Moments>(
        [=](auto& sum, const auto& at) { sum.add(at.e(), at.p(), s, sigma); },
        [&](const Moments<double>& sums) { return search.advance(s, sums); });
    if (next.done) return {next.s, evaluations, true};
  }
  return {next.s, kMaxEvaluations, false};
}

// φ(s)
template <class Row>
ICL_PATCH_INLINE double squares_at(const Row& row, double s, double pole) {
  const auto off_pole = row.template sum_terms<Sum>([=](auto& sum, const auto& at) {
    const auto y = at.p() * (1.0 / (at.e() + s));
    sum.value += y * y;
  });
  return pole > 0 ? off_pole.value + pole / (s * s) : off_pole.value;
}

// ---- a row from beginning to end ----

struct Radius {
  double c, eps;

  ICL_PATCH_INLINE double squared() const { return c > 0 ? c * c / (c * c + eps) : 0; }
  ICL_PATCH_INLINE bool valid() const { return squared() > 0 && squared() < kInfinity; }
};

struct Outcome {
  double shift;
  int32_t evaluations;
  Status status;
};

// The coordinates at the pole take up the missing norm: along the fallback, else along g, else all
// of it in the first of them.
struct PoleDirection {
  double fallback = 0, g = 0;     // factors
  double first = -1, length = 0;  // the coordinate `first` gets `length`

  template <class At, class V>
  ICL_PATCH_INLINE V operator()(const At& at, V g_k) const {
    if (fallback != 0) return at.fallback() * fallback;
    if (g != 0) return g_k * g;
    return select(at.index() == first, V{length}, V{});
  }
};

template <class Row>
ICL_PATCH_INLINE PoleDirection pole_direction(const Row& row, double smallest, double length) {
  using V = typename Row::Value;
  const auto share = row.template sum_inputs<PoleShare>([=](auto& sum, const auto& at) {
    const V m = at.m(), g = at.g(), h = at.fallback();
    const auto pole = distance(m, smallest) == 0.0;
    sum.largest_g = larger(sum.largest_g, select(pole, magnitude(g), V{}));
    sum.largest_fallback = larger(sum.largest_fallback, select(pole, magnitude(h), V{}));
    // where m = 0, g is reached only by a y ≠ 0
    const auto useless = (zero_if_finite(h) != 0.0) | ((m == 0.0) & (g != 0.0) & (h == 0.0));
    sum.unusable += select(pole & useless, V{1}, V{});
    sum.first = smaller(sum.first, select(pole, at.index(), V{kInfinity}));
  });
  PoleDirection direction;
  const bool from_fallback = share.unusable == 0 && share.largest_fallback > 0;
  const double largest = from_fallback ? share.largest_fallback : share.largest_g;
  if (largest > 0) {
    const auto squares = row.template sum_inputs<Sum>([=](auto& sum, const auto& at) {
      const V x = (from_fallback ? at.fallback() : at.g()) / largest;
      sum.value += select(distance(at.m(), smallest) == 0.0, x * x, V{});
    });
    const double factor = length / std::sqrt(squares.value) / largest;
    if (factor < kInfinity) {  // false for the smallest denormal numbers
      (from_fallback ? direction.fallback : direction.g) = factor;
      return direction;
    }
  }
  direction.first = share.first;
  direction.length = length;
  return direction;
}

template <class Row>
ICL_PATCH_INLINE Secular secular(Row& row, double smallest, double target) {
  using V = typename Row::Value;
  const double inverse_root = 1 / std::sqrt(target);
  const auto sums = row.template prepare_terms<Weights>(smallest, [=](auto& sum, const auto& at) {
    const V m = at.m(), e = distance(m, smallest), p = magnitude(m) * magnitude(at.g());
    const V squared = p * p;
    const auto pole = e == 0.0;
    sum.squares += squared;
    sum.weighted_distance += squared * e;
    sum.pole += select(pole, squared, V{});
    sum.far = larger(sum.far, p * (inverse_root * (1 - 8 * kUlp)) - e * (1 + 8 * kUlp));
    sum.nearest = smaller(sum.nearest, select((p > 0.0) & (e > 0.0), e, V{kInfinity}));
  });
  // With margins for the rounding errors of the sums.
  const double size = std::sqrt(sums.squares) * inverse_root;
  const double mean = sums.squares > 0 ? sums.weighted_distance / sums.squares : 0;
  const double tail = size * (1 - 64 * kUlp) - mean * (1 + 64 * kUlp);
  const double from_pole = std::sqrt(sums.pole) * inverse_root * (1 - 64 * kUlp);
  return {target, sums.pole, sums.pole > 0 ? 0 : sums.nearest,
          larger(larger(sums.far, tail), from_pole), size * (1 + 64 * kUlp)};
}

// The power of two that brings m and g to a moderate size; 1 unless the row leaves fp32's range. Its
// inverse is a double, too.
ICL_PATCH_INLINE double scaling_power(double largest) {
  int exponent = 0;
  std::frexp(largest, &exponent);
  if (exponent > -160 && exponent < 160) return 1;
  return std::ldexp(1.0, exponent < -1000 ? 1000 : exponent > 1000 ? -1000 : -exponent);
}

template <class Row>
ICL_PATCH_INLINE Extent<double> extent_of(const Row& row) {
  return row.template sum_inputs<Extent>(
      [](auto& sum, const auto& at) { sum.add(at.m(), at.g()); });
}

template <class Row>
ICL_PATCH_INLINE Outcome invert_row(Row& row, int64_t n, Radius radius,
                                    const Extent<double>& extent) {
  using V = typename Row::Value;
  if (extent.nonfinite != 0) {
    row.store_nan();
    return {kInfinity - kInfinity, 0, kNonfinite};
  }
  if (!radius.valid()) {
    row.store_unchanged();
    return {0, 0, kBadRadius};
  }

  const double power = Row::kNarrow ? 1 : scaling_power(extent.largest);
  const double smallest = extent.smallest * power;
  row.set_scale(power);
  const double target = n * radius.squared();
  const Secular equation = secular(row, smallest, target);

  const double beyond = equation.pole > 0 ? kInfinity : squares_at(row, 0, 0);
  const bool hard = beyond <= target * (1 + 8 * kUlp);  // no root: φ(0) is too small
  Root root{0, 0, true};
  PoleDirection direction;
  double norm2 = target;
  if (hard) {
    const double left_over = beyond < target ? target - beyond : 0;
    direction = pole_direction(row, smallest, std::sqrt(left_over));
    norm2 = beyond + left_over;
  } else {
    root = find_root(row, equation, first_guess(equation, smallest));
    // fp32 does not see the last ulps.
    if (row.is_fp64()) norm2 = squares_at(row, root.s, equation.pole);
  }

  const double unscaled = 1 / power;
  const double missing = hard ? 0 : -1;  // e of the coordinates that take up the missing norm
  const double s = root.s, rescale = std::sqrt(target / norm2);
  const double norm = std::sqrt(radius.c * radius.c + radius.eps);
  const auto any = [=](auto& sum, const auto& at) {
    const V m = at.m(), g = at.g(), e = distance(m, smallest), shifted = e + s;
    const auto at_pole = e == missing;
    const V size = magnitude(m) * magnitude(g) / select(shifted > 0.0, shifted, V{1});
    const V signed_size = select((m < 0.0) != (g < 0.0), -size, size);
    const V y = (hard ? select(at_pole, direction(at, g), signed_size) : signed_size) * rescale;
    const auto by_quotient = at_pole | (m == 0.0);
    const V numerator = select(by_quotient, g, shifted), divisor = select(by_quotient, y, m);
    const V quotient = numerator / select(divisor != 0.0, divisor, V{1});
    const V new_scale = select(by_quotient & (y == 0.0), m, quotient) * unscaled;
    sum.unreachable += select((m == 0.0) & (g != 0.0) & (y == 0.0), V{1}, V{});
    sum.nonfinite += at.store(y * norm, new_scale);
  };
  // The same numbers where no coordinate is at the pole and no m = 0.
  const auto regular = [=](auto& sum, const auto& at) {
    const V m = at.m(), shifted = distance(m, smallest) + s;
    sum.nonfinite += at.store(m * at.g() / shifted * rescale * norm, shifted / m * unscaled);
  };
  const bool is_regular = !hard && smallest > 0 && s > 0;
  const auto faults =
      is_regular ? row.template sum_inputs<Faults>(regular) : row.template sum_inputs<Faults>(any);
  const double shift = s * unscaled * unscaled;
  Status status = faults.unreachable != 0 ? kUnreachable : hard ? kHard : kEasy;
  if (!root.converged || faults.nonfinite != 0 || !(shift < kInfinity)) status = kNoConvergence;
  return {shift, root.evaluations, status};
}

}  // namespace icl_patch
