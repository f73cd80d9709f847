// The CPU driver of the RMSNorm inversion, compiled once per instruction set. All of them
// use vectors of eight doubles, so that every sum has the same tree and every result the same bits.
#include "common/stable_update.h"

#include <algorithm>
#include <memory>
#include <new>

#include "cpu/drivers.h"

namespace icl_patch::ICL_PATCH_ISA {
namespace {

constexpr int kLanes = 8;
// Sums are taken chunk by chunk: few terms lose little to rounding.
constexpr int64_t kChunk = 64 * kLanes;

#if defined(__AVX512F__)
constexpr int kWidth = 8;
#elif defined(__AVX2__)
constexpr int kWidth = 4;
#else
constexpr int kWidth = 2;
#endif
constexpr int kParts = kLanes / kWidth;

using Part = double __attribute__((vector_size(kWidth * sizeof(double))));
using PartMask = decltype(Part{} < Part{});

struct Mask {
  PartMask part[kParts];
};

// Eight doubles, in registers of the instruction set's width. A vector type wider than the
// registers would take 2.8 times as long (GCC 12).
struct alignas(kLanes * sizeof(double)) Vector {
  Part part[kParts];

  Vector() : Vector(0.0) {}
  ICL_PATCH_INLINE Vector(double x) {
    for (Part& each : part) each = Part{} + x;
  }
  double& operator[](int64_t lane) { return reinterpret_cast<double*>(this)[lane]; }
};

#define ICL_PATCH_OPERATOR(Result, Operand, op)                               \
  ICL_PATCH_INLINE Result operator op(Operand x, Operand y) {                 \
    Result result;                                                            \
    for (int i = 0; i < kParts; ++i) result.part[i] = x.part[i] op y.part[i]; \
    return result;                                                            \
  }
ICL_PATCH_OPERATOR(Vector, Vector, +)
ICL_PATCH_OPERATOR(Vector, Vector, -)
ICL_PATCH_OPERATOR(Vector, Vector, *)
ICL_PATCH_OPERATOR(Vector, Vector, /)
ICL_PATCH_OPERATOR(Mask, Vector, <)
ICL_PATCH_OPERATOR(Mask, Vector, >)
ICL_PATCH_OPERATOR(Mask, Vector, <=)
ICL_PATCH_OPERATOR(Mask, Vector, ==)
ICL_PATCH_OPERATOR(Mask, Vector, !=)
ICL_PATCH_OPERATOR(Mask, Mask, &)
ICL_PATCH_OPERATOR(Mask, Mask, |)
ICL_PATCH_OPERATOR(Mask, Mask, !=)
#undef ICL_PATCH_OPERATOR

ICL_PATCH_INLINE Vector operator-(Vector x) {
  for (Part& each : x.part) each = -each;
  return x;
}
ICL_PATCH_INLINE Vector& operator+=(Vector& x, Vector y) { return x = x + y; }
ICL_PATCH_INLINE Vector& operator*=(Vector& x, Vector y) { return x = x * y; }

ICL_PATCH_INLINE Vector select(Mask condition, Vector x, Vector y) {
  for (int i = 0; i < kParts; ++i) x.part[i] = condition.part[i] ? x.part[i] : y.part[i];
  return x;
}

// One row in fp64, padded to a whole number of vectors. m_ holds the scale and then m, g_ delta and
// then g.
class CpuRow {
 public:
  using Value = Vector;
  static constexpr bool kNarrow = false;  // known only at run time

  CpuRow(const Inversion& call, int64_t b, double* scratch, int64_t padded)
      : call_(call),
        b_(b),
        m_(scratch),
        g_(m_ + padded),
        h_(g_ + padded),
        e_(h_ + padded),
        p_(e_ + padded) {
    load(call.scale, m_, !call.delta.data);  // 0 adds nothing to the sums before set_update
    load(call.delta.data ? call.delta : call.target, g_, false);
    if (call.delta.data) load(call.fallback, h_, false);
  }

  bool is_fp64() const { return call_.hidden_is_fp64; }

  class At {
   public:
    ICL_PATCH_INLINE At(const CpuRow& row, int64_t i) : row_(row), i_(i) {}
    ICL_PATCH_INLINE Vector m() const { return get(row_.m_); }
    ICL_PATCH_INLINE Vector g() const { return get(row_.g_); }
    ICL_PATCH_INLINE Vector e() const { return get(row_.e_); }
    ICL_PATCH_INLINE Vector p() const { return get(row_.p_); }
    ICL_PATCH_INLINE Vector scale() const { return get(row_.m_); }
    ICL_PATCH_INLINE Vector delta() const { return get(row_.g_); }
    ICL_PATCH_INLINE Vector fallback() const {
      if (row_.call_.delta.data) return get(row_.h_);
      return row_.call_.fallback.data ? from(row_.call_.fallback) : Vector{};
    }
    ICL_PATCH_INLINE Vector index() const {
      Vector x;
      for (int lane = 0; lane < kLanes; ++lane) x[lane] = static_cast<double>(i_ + lane);
      return x;
    }
    ICL_PATCH_INLINE Vector store(Vector hidden, Vector new_scale) const {
      return put(row_.call_.delta.data ? hidden - get(row_.h_) : hidden, new_scale);
    }
    ICL_PATCH_INLINE void prepare_terms(double smallest) const {
      const auto [e, p] = term(m(), g(), smallest);
      write(row_.e_ + i_, e, kLanes);
      write(row_.p_ + i_, p, kLanes);
    }
    ICL_PATCH_INLINE void store_unchanged() const { put(Vector{}, from(row_.call_.scale)); }

   private:
    ICL_PATCH_INLINE Vector put(Vector hidden, Vector new_scale) const {
      const int64_t first = row_.b_ * row_.call_.n + i_;
      const int64_t count = std::min<int64_t>(kLanes, row_.call_.n - i_);
      write(row_.call_.new_scale + first, new_scale, count);
      if (row_.is_fp64()) {
        write(static_cast<double*>(row_.call_.hidden) + first, hidden, count);
      } else {
        float narrow[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) narrow[lane] = static_cast<float>(hidden[lane]);
        write(static_cast<float*>(row_.call_.hidden) + first, narrow, count);
        for (int lane = 0; lane < kLanes; ++lane) hidden[lane] = narrow[lane];
      }
      return zero_if_finite(hidden) + zero_if_finite(new_scale);
    }
    ICL_PATCH_INLINE Vector get(const double* row) const {
      return *reinterpret_cast<const Vector*>(row + i_);
    }
    Vector from(const Matrix& matrix) const {
      Vector x;
      for (int64_t lane = 0; lane < kLanes && i_ + lane < row_.call_.n; ++lane)
        x[lane] = matrix.at(row_.b_, i_ + lane);
      return x;
    }
    template <class T, class V>
    ICL_PATCH_INLINE static void write(T* out, const V& x, int64_t count) {
      memcpy(out, &x, count == kLanes ? sizeof(V) : count * sizeof(T));
    }

    const CpuRow& row_;
    int64_t i_;
  };

  template <template <class> class S, class F>
  ICL_PATCH_INLINE S<double> sum_terms(F f) const {
    S<Vector> total;
    for (int64_t chunk = 0; chunk < call_.n; chunk += kChunk) {
      S<Vector> sum;
      const int64_t end = std::min(chunk + kChunk, call_.n);
      for (int64_t i = chunk; i < end; i += kLanes) f(sum, At(*this, i));
      total.merge(sum);
    }
    return across_lanes<S>(total);
  }

  template <template <class> class S, class F>
  ICL_PATCH_INLINE S<double> sum_inputs(F f) const {
    return sum_terms<S>(f);
  }

  template <template <class> class S, class F, class G>
  ICL_PATCH_INLINE auto sum_terms_once(F f, G then) const {
    return then(sum_terms<S>(f));
  }

  void set_scale(double power) const {
    if (power == 1) return;
    for (int64_t i = 0; i < g_ - m_; ++i) {
      m_[i] *= power;
      g_[i] *= power;
    }
  }

  template <template <class> class S, class F>
  S<double> prepare_terms(double smallest, F f) const {
    for (int64_t i = 0; i < call_.n; i += kLanes) At(*this, i).prepare_terms(smallest);
    return sum_inputs<S>(f);
  }

  void store_unchanged() const {
    for (int64_t i = 0; i < call_.n; i += kLanes) At(*this, i).store_unchanged();
  }

  void store_nan() const {
    const Vector nan{kInfinity - kInfinity};
    for (int64_t i = 0; i < call_.n; i += kLanes) At(*this, i).store(nan, nan);
  }

  void set_update(const Update& update) const {
    for (int64_t i = 0; i < call_.n; ++i) {
      g_[i] = update.g(g_[i], m_[i], h_[i]);
      m_[i] = update.m(m_[i]);
    }
    pad(m_, true);
  }

 private:
  template <template <class> class S>
  ICL_PATCH_INLINE static S<double> across_lanes(const S<Vector>& total) {
    constexpr int kValues = sizeof(S<double>) / sizeof(double);
    double values[kValues][kLanes];
    static_assert(sizeof total == sizeof values);
    memcpy(values, &total, sizeof values);
    S<double> lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      for (int value = 0; value < kValues; ++value)
        reinterpret_cast<double*>(&lanes[lane])[value] = values[value][lane];
    for (int width = kLanes / 2; width; width /= 2)
      for (int lane = 0; lane < width; ++lane) lanes[lane].merge(lanes[lane + width]);
    return lanes[0];
  }

  // Fills the padding with 0, or with m's first entry, which leaves the smallest m alone.
  void pad(double* row, bool with_first) const {
    for (int64_t i = call_.n; i % kLanes; ++i) row[i] = with_first ? row[0] : 0;
  }

  void load(const Matrix& x, double* to, bool with_first) const {
    x.visit([&](const auto* data) {
      const auto* from = data + b_ * x.row;
      if (x.column == 1) {
        for (int64_t i = 0; i < call_.n; ++i) to[i] = from[i];
      } else {
        for (int64_t i = 0; i < call_.n; ++i) to[i] = from[i * x.column];
      }
    });
    pad(to, with_first);
  }

  const Inversion& call_;
  int64_t b_;
  double *m_, *g_, *h_, *e_, *p_;
};

}  // namespace

void invert_rows(const Inversion& call, int64_t begin, int64_t end) {
  constexpr std::align_val_t kAlignment{sizeof(Vector)};
  const auto release = [](double* x) { ::operator delete(x, kAlignment); };
  const int64_t padded = (call.n + kLanes - 1) / kLanes * kLanes;
  const std::unique_ptr<double, decltype(release)> scratch(
      static_cast<double*>(::operator new(5 * padded * sizeof(double), kAlignment)), release);
  for (int64_t b = begin; b < end; ++b) {
    CpuRow row(call, b, scratch.get(), padded);
    const Outcome outcome =
        call.delta.data ? update_row(row, call.n, call.eps)
                        : invert_row(row, call.n, {call.rms.at(b, 0), call.eps}, extent_of(row));
    call.shift[b] = outcome.shift;
    call.status[b] = outcome.status;
    call.evaluations[b] = outcome.evaluations;
  }
}

}  // namespace icl_patch::ICL_PATCH_ISA
