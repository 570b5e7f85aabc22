// The CPU implementation of the gptframe_gelu operators: threads over the loops of gelu_cpu_variants.h.
#include "gelu_cpu_variants.h"
#include "gelu_torch.h"

#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using gelu::ScalarType;
using gelu::Tensor;

const Loops& loops(ScalarType type, bool float_bias = false) {
  const Loops* table = variant().table;
  switch (type) {
    case ScalarType::Float:
      return table[0];
    case ScalarType::Double:
      return table[1];
    case ScalarType::Half:
      return table[float_bias ? 4 : 2];
    default:
      return table[float_bias ? 5 : 3];
  }
}

// An output of many megabytes comes fresh from the kernel, one fault a page: half of the time of a call. Asking for
// huge pages, before the first write, makes it one fault per 2 MiB. A hint: nothing depends on it.
Tensor advised(Tensor t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2u << 20;
  const uintptr_t begin = (uintptr_t)t.mutable_data_ptr();
  const uintptr_t first = (begin + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t last = (begin + (uintptr_t)t.numel() * t.element_size()) & ~(kHuge - 1);
  if (last > first && last - first >= 4 * kHuge) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
  return t;
}

constexpr int64_t kGrain = 32768;  // elements a thread takes at least, as in ATen

const char* at(const void* p, int64_t i, int64_t size) { return (const char*)p + i * size; }
char* at(void* p, int64_t i, int64_t size) { return (char*)p + i * size; }

Tensor forward(const Tensor& x) {
  gelu::check_float(x);
  Tensor y = advised(torch::stable::empty_like(x));
  const Tensor in = gelu::laid_out_as(x, y);
  const Loops& f = loops(x.scalar_type());
  const void* px = in.const_data_ptr();
  void* py = y.mutable_data_ptr();
  const int64_t size = (int64_t)x.element_size();
  torch::stable::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    f.forward(at(px, begin, size), at(py, begin, size), end - begin);
  });
  return y;
}

Tensor backward(const Tensor& g, const Tensor& x) {
  gelu::check_float(x);
  gelu::check_same(g, x, "the gradient");
  Tensor dx = advised(torch::stable::empty_like(x));
  const Tensor in = gelu::laid_out_as(x, dx), grad = gelu::laid_out_as(g, dx);
  const Loops& f = loops(x.scalar_type());
  const void *px = in.const_data_ptr(), *pg = grad.const_data_ptr();
  void* pd = dx.mutable_data_ptr();
  const int64_t size = (int64_t)x.element_size();
  torch::stable::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    f.backward(at(pg, begin, size), at(px, begin, size), at(pd, begin, size), end - begin);
  });
  return dx;
}

Tensor double_backward(const Tensor& gg, const Tensor& g, const Tensor& x) {
  gelu::check_float(x);
  gelu::check_same(g, x, "the gradient");
  gelu::check_same(gg, x, "the gradient's gradient");
  Tensor dx = advised(torch::stable::empty_like(x));
  const Tensor in = gelu::laid_out_as(x, dx), grad = gelu::laid_out_as(g, dx), gradgrad = gelu::laid_out_as(gg, dx);
  const Loops& f = loops(x.scalar_type());
  const void *px = in.const_data_ptr(), *pg = grad.const_data_ptr(), *pgg = gradgrad.const_data_ptr();
  void* pd = dx.mutable_data_ptr();
  const int64_t size = (int64_t)x.element_size();
  torch::stable::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    f.double_backward(at(pgg, begin, size), at(pg, begin, size), at(px, begin, size), at(pd, begin, size), end - begin);
  });
  return dx;
}

bool is_float_bias(const Tensor& x, const Tensor& bias) { return bias.scalar_type() != x.scalar_type(); }

Tensor bias_forward(const Tensor& x, const Tensor& bias) {
  gelu::check_float(x);
  gelu::check_bias(x, bias);
  const Tensor in = gelu::contiguous(x), b = gelu::contiguous(bias);
  Tensor y = advised(torch::stable::empty_like(in));
  const int64_t columns = bias.size(0), rows = columns ? x.numel() / columns : 0;
  const Loops& f = loops(x.scalar_type(), is_float_bias(x, bias));
  const void *px = in.const_data_ptr(), *pb = b.const_data_ptr();
  void* py = y.mutable_data_ptr();
  const int64_t stride = columns * (int64_t)x.element_size(), grain = 1 + kGrain / (columns + 1);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    f.bias_forward(at(px, begin, stride), pb, at(py, begin, stride), end - begin, columns);
  });
  return y;
}

// Rows are cut into the same parts whatever the number of threads, each part has its own sums, and the parts are added
// in order: the bias gradient is the same from run to run.
std::tuple<Tensor, Tensor> bias_backward(const Tensor& g, const Tensor& x, const Tensor& bias) {
  gelu::check_float(x);
  gelu::check_bias(x, bias);
  gelu::check_same(g, x, "the gradient");
  const Tensor in = gelu::contiguous(x), b = gelu::contiguous(bias), grad = gelu::contiguous(g);
  Tensor dx = advised(torch::stable::empty_like(in));
  const int64_t columns = bias.size(0), rows = columns ? x.numel() / columns : 0;
  const int64_t per_part = rows > 64 * 16 ? (rows + 63) / 64 : 16, parts = (rows + per_part - 1) / per_part;
  const bool wide = x.scalar_type() == ScalarType::Double;
  const auto sum_type = wide ? ScalarType::Double : ScalarType::Float;
  Tensor partial = torch::stable::new_zeros(x, {parts, columns}, sum_type);
  Tensor total = torch::stable::new_empty(bias, {columns}, sum_type);
  const Loops& f = loops(x.scalar_type(), is_float_bias(x, bias));
  const void *px = in.const_data_ptr(), *pg = grad.const_data_ptr(), *pb = b.const_data_ptr();
  void *pd = dx.mutable_data_ptr(), *ps = partial.mutable_data_ptr(), *pt = total.mutable_data_ptr();
  const int64_t stride = columns * (int64_t)x.element_size(), sum_stride = columns * (wide ? 8 : 4);
  const int64_t grain = 1 + kGrain / (columns * per_part + 1);
  torch::stable::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * per_part, last = first + per_part < rows ? first + per_part : rows;
      f.bias_backward(at(pg, first, stride), at(px, first, stride), pb, at(pd, first, stride), at(ps, p, sum_stride),
                      last - first, columns);
    }
  });
  std::vector<double> sum((size_t)columns, 0.0);
  for (int64_t p = 0; p < parts; ++p)
    for (int64_t c = 0; c < columns; ++c)
      sum[c] += wide ? ((const double*)ps)[p * columns + c] : (double)((const float*)ps)[p * columns + c];
  for (int64_t c = 0; c < columns; ++c) {
    if (wide)
      ((double*)pt)[c] = sum[c];
    else
      ((float*)pt)[c] = (float)sum[c];
  }
  if (bias.scalar_type() == sum_type) return {dx, total};
  Tensor narrow = torch::stable::empty_like(b);
  torch::stable::copy_(narrow, total);
  return {dx, narrow};
}

}  // namespace

// The name of the variant in use, for logs and tests.
extern "C" __attribute__((visibility("default"))) const char* gptframe_gelu_cpu_variant() { return variant().name; }

STABLE_TORCH_LIBRARY_IMPL(gptframe_gelu, CPU, m) {
  m.impl("gelu", TORCH_BOX(&forward));
  m.impl("gelu_backward", TORCH_BOX(&backward));
  m.impl("gelu_double_backward", TORCH_BOX(&double_backward));
  m.impl("bias_gelu", TORCH_BOX(&bias_forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_backward));
}
