// The one definition of tanh-GELU and its derivatives, shared by the CPU kernels, the CUDA kernels and the tests.
//
// tanh-GELU (Hendrycks and Gimpel, 2016) is x*sigmoid(v) with v = 2*sqrt(2/pi)*(x + 0.044715*x^3), since
// (1 + tanh(v/2))/2 = sigmoid(v). Everything below is written with e = exp(-|v|), which is at most 1: no subtraction
// cancels in the tails (1 + tanh does), and nothing overflows for a finite x. The value at -infinity is NaN, as ATen's;
// the derivatives at infinities are their limits.
//
// With h = e/(1+e) = sigmoid(-|v|), at most 1/2, sigmoid(v) is 1-h for x > 0 and h otherwise.
//
// No include guard on purpose: gelu_cpu.cpp includes this file once per instruction set, each time in its own
// namespace. The includer defines GELU_FN (function qualifiers) and, per use, a policy M that says how to compute:
//   M::R                       the arithmetic type, a scalar or a vector
//   M::c(double)               a constant
//   M::fma(a, b, c)            a*b + c in one rounding
//   M::positive(x, a, b)       x > 0 ? a : b
//   M::magnitude(x)            min(|x|, kCap), where e has underflowed to 0 at kCap; NaN for a NaN
//   M::exp2(t)                 2^t for t from the exponent at kCap up to 0
//   M::reciprocal(q)           1/q for 1 <= q <= 2, to an ulp or so
//   M::kStyle                  kExact makes up for what e/(1+e) loses to rounding (float and double); kQuick does not,
//                              since 16-bit results hide it; kSigned is kQuick where exp2 and reciprocal saturate in
//                              one instruction: the value then takes exp(-v) as it is, infinite or not

// log2(e) * 2*sqrt(2/pi), the same times 0.044715, and the coefficients of v' = V1 + V3*x^2 and v'' = 2*V3*x.
#define GELU_A 2.302208198144324889133895
#define GELU_B 0.1029432395800234874176221
#define GELU_V1 1.595769121605730711759784
#define GELU_V3 0.2140644488178007463290163

enum GeluStyle { kExact, kQuick, kSigned };

// h, and what its rounding lost (0 unless kExact). m is the magnitude of x.
template <class M>
struct GeluTail {
  typename M::R h, lost;
};
template <class M>
GELU_FN GeluTail<M> gelu_tail(typename M::R m, typename M::R x2) {
  using R = typename M::R;
  const R e = M::exp2(m * M::fma(M::c(-GELU_B), x2, M::c(-GELU_A)));
  const R q = M::c(1) + e;
  const R r = M::reciprocal(q);
  const R h = e * r;
  if (M::kStyle != kExact) return {h, M::c(0)};
  const R q_lost = (M::c(1) - q) + e;
  return {h, M::fma(-h, q_lost, M::fma(-h, q, e)) * r};
}

// y = x - x*h for x > 0, else x*h
template <class M>
GELU_FN typename M::R gelu_value(typename M::R x) {
  using R = typename M::R;
  if (M::kStyle == kSigned)
    return x * M::reciprocal(M::c(1) + M::exp2(x * M::fma(M::c(-GELU_B), x * x, M::c(-GELU_A))));
  const R m = M::magnitude(x);
  const GeluTail<M> tail = gelu_tail<M>(m, m * m);
  const R h = M::kStyle == kExact ? tail.h + tail.lost : tail.h;
  return M::positive(x, M::fma(-m, h, x), x * h);
}

// dy/dx = s + x*v'*s*(1-s), s = sigmoid(v): 1+g for x > 0, else -g, with g = |x|*v'*h*(1-h) - h
template <class M>
GELU_FN typename M::R gelu_slope(typename M::R x) {
  using R = typename M::R;
  const R m = M::magnitude(x);
  const R x2 = m * m;
  const GeluTail<M> tail = gelu_tail<M>(m, x2);
  const R h = tail.h, u = m * M::fma(M::c(GELU_V3), x2, M::c(GELU_V1));
  const R p = M::fma(-h, h, h);
  const R g = M::kStyle == kExact ? M::fma(u, p, -tail.lost) - h : M::fma(u, p, -h);
  return M::positive(x, M::c(1) + g, -g);
}

// d2y/dx2 = p*(2*v' + x*v'' + x*(1-2s)*v'^2), p = s*(1-s) = h*(1-h); an even function
template <class M>
GELU_FN typename M::R gelu_curvature(typename M::R x) {
  using R = typename M::R;
  const R m = M::magnitude(x);
  const R x2 = m * m;
  const R h = gelu_tail<M>(m, x2).h;
  const R dv = M::fma(M::c(GELU_V3), x2, M::c(GELU_V1));
  const R k = M::fma(M::c(-2), h, M::c(1)) * m;
  return M::fma(-h, h, h) * M::fma(-(k * dv), dv, M::fma(M::c(2 * GELU_V3), x2, M::c(2) * dv));
}

// 2^f for |f| <= 1/2 by minimax polynomials with value 1 at 0. Relative errors: degree 5 1.5e-7 and degree 6 2.5e-9, to
// be compared with 6.0e-8, half a unit in the last place of a float; degree 11 3.1e-18, with 1.1e-16 of a double.
template <class M>
GELU_FN typename M::R gelu_exp2_degree5(typename M::R f) {
  typename M::R p = M::c(0.00132764721678);
  p = M::fma(p, f, M::c(0.00967554133102));
  p = M::fma(p, f, M::c(0.0555071327288));
  p = M::fma(p, f, M::c(0.24022119724));
  p = M::fma(p, f, M::c(0.693146967065));
  return M::fma(p, f, M::c(1));
}
template <class M>
GELU_FN typename M::R gelu_exp2_degree6(typename M::R f) {
  typename M::R p = M::c(0.000153458121587);
  p = M::fma(p, f, M::c(0.00133999312095));
  p = M::fma(p, f, M::c(0.00961848895652));
  p = M::fma(p, f, M::c(0.05550328777));
  p = M::fma(p, f, M::c(0.240226468906));
  p = M::fma(p, f, M::c(0.693147205737));
  return M::fma(p, f, M::c(1));
}
template <class M>
GELU_FN typename M::R gelu_exp2_degree11(typename M::R f) {
  typename M::R p = M::c(4.4352809446103361611e-10);
  p = M::fma(p, f, M::c(7.0741056262456593708e-9));
  p = M::fma(p, f, M::c(1.0178198033328527662e-7));
  p = M::fma(p, f, M::c(1.3215433089594629037e-6));
  p = M::fma(p, f, M::c(0.0000152527334899608046));
  p = M::fma(p, f, M::c(0.00015403530462514613026));
  p = M::fma(p, f, M::c(0.0013333558146789950323));
  p = M::fma(p, f, M::c(0.0096181291075883350833));
  p = M::fma(p, f, M::c(0.055504108664819921483));
  p = M::fma(p, f, M::c(0.24022650695910156205));
  p = M::fma(p, f, M::c(0.69314718055994533046));
  return M::fma(p, f, M::c(1));
}

template <class To, class From>
GELU_FN To gelu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "gelu_bits needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// The scalar policies. GELU_FMAF and GELU_FMA are the fused multiply-adds of the includer. 2^n is applied as two
// factors, so that results below the smallest normal number round to denormals and then to zero.
template <bool Exact>
struct ScalarFloat {
  using R = float;
  static constexpr GeluStyle kStyle = Exact ? kExact : kQuick;
  static constexpr R kCap = 12.0f;  // 2^-206
  GELU_FN static constexpr R c(double v) { return (R)v; }
  GELU_FN static R fma(R a, R b, R d) { return Exact ? GELU_FMAF(a, b, d) : a * b + d; }
  GELU_FN static R positive(R x, R a, R b) { return x > 0.0f ? a : b; }
  GELU_FN static R magnitude(R x) {
    const R m = gelu_bits<R>(gelu_bits<int>(x) & 0x7fffffff);
    return kCap < m ? kCap : m;
  }
  GELU_FN static R exp2(R t) {
    const R shifted = 12582912.0f + t;  // 1.5*2^23 puts the rounded exponent into the low bits
    const int n = gelu_bits<int>(shifted) - gelu_bits<int>(12582912.0f);
    const R f = t - (shifted - 12582912.0f);
    const R p = Exact ? gelu_exp2_degree6<ScalarFloat>(f) : gelu_exp2_degree5<ScalarFloat>(f);
    const int half = n >> 1;
    return p * gelu_bits<R>((half + 127) << 23) * gelu_bits<R>((n - half + 127) << 23);
  }
  GELU_FN static R reciprocal(R q) { return 1.0f / q; }
};

struct ScalarDouble {
  using R = double;
  static constexpr GeluStyle kStyle = kExact;
  static constexpr R kCap = 24.0;  // 2^-1478
  GELU_FN static constexpr R c(double v) { return v; }
  GELU_FN static R fma(R a, R b, R d) { return GELU_FMA(a, b, d); }
  GELU_FN static R positive(R x, R a, R b) { return x > 0.0 ? a : b; }
  GELU_FN static R magnitude(R x) {
    const R m = gelu_bits<R>(gelu_bits<long long>(x) & 0x7fffffffffffffffLL);
    return kCap < m ? kCap : m;
  }
  GELU_FN static R exp2(R t) {
    const R shifted = 6755399441055744.0 + t;  // 1.5*2^52
    const int n = (int)(gelu_bits<long long>(shifted) - gelu_bits<long long>(6755399441055744.0));
    const R f = t - (shifted - 6755399441055744.0);
    const R p = gelu_exp2_degree11<ScalarDouble>(f);
    const int half = n >> 1;
    return p * gelu_bits<R>((long long)(half + 1023) << 52) * gelu_bits<R>((long long)(n - half + 1023) << 52);
  }
  GELU_FN static R reciprocal(R q) { return 1.0 / q; }
};
