// The CUDA operators: launches of the kernels in gelu_kernels.h, registered as the CUDA implementation of the
// gptframe_gelu operators. The stream comes from torch's stable ABI, so that the object also loads (and then waits
// unused) where torch was built for CPUs.
#include "gelu_kernels.h"
#include "gelu_torch.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace {

using gelu::ScalarType;
using gelu::Tensor;
namespace k = gelu_cuda;

struct On {  // the device of x made current, and its current stream
  explicit On(const Tensor& x)
      : guard(x.get_device_index()),
        stream((cudaStream_t)torch::stable::accelerator::getCurrentStream(x.get_device_index()).nativeHandle()) {}
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
};

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

unsigned grid(long long blocks) {
  STD_TORCH_CHECK(blocks <= 0x7fffffffLL, "gelu: the tensor needs more blocks than a CUDA grid has");
  return (unsigned)blocks;
}

template <class... P>
bool aligned(const P*... pointers) {
  return (((uintptr_t)pointers | ...) & 15) == 0;
}

template <class Op, class T, int V, class Kernel>
void launch(const On& on, Kernel vectorised, Kernel single, void* out, const void* a, const void* b, const void* c,
            long long n, const char* what) {
  if (n == 0) return;
  if (aligned((char*)out, (char*)a, (char*)b, (char*)c))
    vectorised<<<grid(k::elementwise_blocks<Op, V>(n)), k::kThreads, 0, on.stream>>>((T*)out, (const T*)a, (const T*)b,
                                                                                    (const T*)c, n);
  else
    single<<<grid(k::elementwise_blocks<Op, 1>(n)), k::kThreads, 0, on.stream>>>((T*)out, (const T*)a, (const T*)b,
                                                                               (const T*)c, n);
  check_launch(what);
}

#define GELU_LAUNCH(OP, NAME, WHAT)                                                                               \
  switch (x.scalar_type()) {                                                                                      \
    case ScalarType::Float:                                                                                       \
      launch<k::OP, float, 4>(on, k::NAME##_f32_vec, k::NAME##_f32_v1, out, a, b, c, n, WHAT);                    \
      break;                                                                                                      \
    case ScalarType::Double:                                                                                      \
      launch<k::OP, double, 2>(on, k::NAME##_f64_vec, k::NAME##_f64_v1, out, a, b, c, n, WHAT);                   \
      break;                                                                                                      \
    case ScalarType::Half:                                                                                        \
      launch<k::OP, k::Half, 8>(on, k::NAME##_f16_vec, k::NAME##_f16_v1, out, a, b, c, n, WHAT);                  \
      break;                                                                                                      \
    default:                                                                                                      \
      launch<k::OP, k::BFloat16, 8>(on, k::NAME##_bf16_vec, k::NAME##_bf16_v1, out, a, b, c, n, WHAT);            \
  }

Tensor forward(const Tensor& x) {
  gelu::check_float(x);
  Tensor y = torch::stable::empty_like(x);
  const Tensor in = gelu::laid_out_as(x, y);
  const On on(x);
  void* out = y.mutable_data_ptr();
  const void *a = in.const_data_ptr(), *b = nullptr, *c = nullptr;
  const long long n = x.numel();
  GELU_LAUNCH(Forward, gelu_forward, "gelu")
  return y;
}

Tensor backward(const Tensor& g, const Tensor& x) {
  gelu::check_float(x);
  gelu::check_same(g, x, "the gradient");
  Tensor dx = torch::stable::empty_like(x);
  const Tensor grad = gelu::laid_out_as(g, dx), in = gelu::laid_out_as(x, dx);
  const On on(x);
  void* out = dx.mutable_data_ptr();
  const void *a = grad.const_data_ptr(), *b = in.const_data_ptr(), *c = nullptr;
  const long long n = x.numel();
  GELU_LAUNCH(Backward, gelu_backward, "gelu_backward")
  return dx;
}

Tensor double_backward(const Tensor& gg, const Tensor& g, const Tensor& x) {
  gelu::check_float(x);
  gelu::check_same(g, x, "the gradient");
  gelu::check_same(gg, x, "the gradient's gradient");
  Tensor dx = torch::stable::empty_like(x);
  const Tensor gradgrad = gelu::laid_out_as(gg, dx), grad = gelu::laid_out_as(g, dx), in = gelu::laid_out_as(x, dx);
  const On on(x);
  void* out = dx.mutable_data_ptr();
  const void *a = gradgrad.const_data_ptr(), *b = grad.const_data_ptr(), *c = in.const_data_ptr();
  const long long n = x.numel();
  GELU_LAUNCH(DoubleBackward, gelu_double_backward, "gelu_double_backward")
  return dx;
}

// Calls f(Kinds<T, B, V>, vectorised kernel, single kernel) for the dtypes of x and bias.
template <class T_, class B_, int V_>
struct Kinds {
  using T = T_;
  using B = B_;
  static constexpr int V = V_;
};

#define GELU_BIAS_CASE(NAME, T, B, V, KERNEL) f(Kinds<T, B, V>{}, k::KERNEL##_##NAME##_vec, k::KERNEL##_##NAME##_v1)
#define GELU_BIAS_DISPATCH(KERNEL)                                                      \
  const bool same = bias.scalar_type() == x.scalar_type();                              \
  switch (x.scalar_type()) {                                                            \
    case ScalarType::Float:                                                             \
      GELU_BIAS_CASE(f32_f32, float, float, 4, KERNEL);                                 \
      break;                                                                            \
    case ScalarType::Double:                                                            \
      GELU_BIAS_CASE(f64_f64, double, double, 2, KERNEL);                               \
      break;                                                                            \
    case ScalarType::Half:                                                              \
      if (same)                                                                         \
        GELU_BIAS_CASE(f16_f16, k::Half, k::Half, 8, KERNEL);                           \
      else                                                                              \
        GELU_BIAS_CASE(f16_f32, k::Half, float, 8, KERNEL);                             \
      break;                                                                            \
    default:                                                                            \
      if (same)                                                                         \
        GELU_BIAS_CASE(bf16_bf16, k::BFloat16, k::BFloat16, 8, KERNEL);                 \
      else                                                                              \
        GELU_BIAS_CASE(bf16_f32, k::BFloat16, float, 8, KERNEL);                        \
  }

Tensor bias_forward(const Tensor& x, const Tensor& bias) {
  gelu::check_float(x);
  gelu::check_bias(x, bias);
  const Tensor in = gelu::contiguous(x), add = gelu::contiguous(bias);
  Tensor y = torch::stable::empty_like(in);
  const long long columns = bias.size(0), rows = columns ? x.numel() / columns : 0;
  if (rows == 0) return y;
  const On on(x);
  void* out = y.mutable_data_ptr();
  const void *px = in.const_data_ptr(), *pb = add.const_data_ptr();
  auto f = [&](auto kinds, auto vectorised, auto single) {
    using K = decltype(kinds);
    using T = typename K::T;
    using B = typename K::B;
    const bool wide = columns % K::V == 0 && aligned((char*)out, (char*)px, (char*)pb);
    const k::Tiling t = k::tiling(rows, columns, wide ? K::V : 1);
    (wide ? vectorised : single)<<<grid(t.chunks * t.tiles), k::kThreads, 0, on.stream>>>(
        (T*)out, (const T*)px, (const B*)pb, rows, columns, t);
    check_launch("bias_gelu");
  };
  GELU_BIAS_DISPATCH(gelu_bias_forward)
  return y;
}

std::tuple<Tensor, Tensor> bias_backward(const Tensor& g, const Tensor& x, const Tensor& bias) {
  gelu::check_float(x);
  gelu::check_bias(x, bias);
  gelu::check_same(g, x, "the gradient");
  const Tensor in = gelu::contiguous(x), add = gelu::contiguous(bias), grad = gelu::contiguous(g);
  Tensor dx = torch::stable::empty_like(in), db = torch::stable::empty_like(add);
  const long long columns = bias.size(0), rows = columns ? x.numel() / columns : 0;
  if (rows == 0) return {dx, torch::stable::zero_(db)};
  const On on(x);
  void *out = dx.mutable_data_ptr(), *sums = db.mutable_data_ptr();
  const void *pg = grad.const_data_ptr(), *px = in.const_data_ptr(), *pb = add.const_data_ptr();
  auto f = [&](auto kinds, auto vectorised, auto single) {
    using K = decltype(kinds);
    using T = typename K::T;
    using B = typename K::B;
    using W = typename k::Widen<T>::W;
    const bool wide = columns % K::V == 0 && aligned((char*)out, (char*)pg, (char*)px, (char*)pb);
    const k::Tiling t = k::tiling(rows, columns, wide ? K::V : 1);
    Tensor partial = torch::stable::new_empty(
        x, {t.chunks, columns}, sizeof(W) == 8 ? ScalarType::Double : ScalarType::Float);
    W* p = (W*)partial.mutable_data_ptr();
    (wide ? vectorised : single)<<<grid(t.chunks * t.tiles), k::kThreads, 0, on.stream>>>(
        (T*)out, (const T*)pg, (const T*)px, (const B*)pb, p, rows, columns, t);
    check_launch("bias_gelu_backward");
    const unsigned blocks = grid((columns + k::kLanes - 1) / k::kLanes);
    if constexpr (sizeof(B) == 8)
      k::gelu_reduce_f64<<<blocks, k::kThreads, 0, on.stream>>>((double*)sums, (const double*)p, t.chunks, columns);
    else if constexpr (sizeof(B) == 4)
      k::gelu_reduce_f32<<<blocks, k::kThreads, 0, on.stream>>>((float*)sums, (const float*)p, t.chunks, columns);
    else if constexpr (std::is_same_v<B, k::Half>)
      k::gelu_reduce_f16<<<blocks, k::kThreads, 0, on.stream>>>((k::Half*)sums, (const float*)p, t.chunks, columns);
    else
      k::gelu_reduce_bf16<<<blocks, k::kThreads, 0, on.stream>>>((k::BFloat16*)sums, (const float*)p, t.chunks, columns);
    check_launch("bias_gelu_backward");
  };
  GELU_BIAS_DISPATCH(gelu_bias_backward)
  return {dx, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptframe_gelu, CUDA, m) {
  m.impl("gelu", TORCH_BOX(&forward));
  m.impl("gelu_backward", TORCH_BOX(&backward));
  m.impl("gelu_double_backward", TORCH_BOX(&double_backward));
  m.impl("bias_gelu", TORCH_BOX(&bias_forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_backward));
}
