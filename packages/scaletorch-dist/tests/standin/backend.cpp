// A collective backend for the stand-in device: its memory is the host's, so gloo can work on it.
// It refuses the operations, and by the table of devices the dtypes, that the vendors' libraries do
// not reduce, so that tests show that nobody asks for them.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <ATen/ATen.h>
#include <set>
#include "stream.h"

void* kernels_address(const void* data);

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Backend final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> inner;
  std::string name;
  std::set<at::ScalarType> reduced;
  bool narrow;
  Flag aborted = std::make_shared<std::atomic<bool>>(false);

  Backend(c10::intrusive_ptr<c10d::Backend> inner_, std::string name_,
          const std::vector<at::ScalarType>& reduced_, bool narrow_)
      : c10d::Backend(inner_->getRank(), inner_->getSize()),
        inner(std::move(inner_)),
        name(std::move(name_)),
        reduced(reduced_.begin(), reduced_.end()),
        narrow(narrow_) {}

  Tensor on_host(const Tensor& data) const {
    TORCH_CHECK(data.is_privateuseone(), "the stand-in's backend got a tensor on ", data.device());
    TORCH_CHECK(data.is_contiguous(), "the stand-in's backend needs contiguous tensors");
    TORCH_CHECK(!data.is_complex(), "the stand-in's backend knows no complex numbers");
    Tensor keep = data.detach();
    auto host = at::from_blob(kernels_address(data.data_ptr()), data.sizes(), data.strides(),
                              [keep](void*) {},
                              data.options().device(at::kCPU).requires_grad(false));
    if (narrow && host.scalar_type() == at::kDouble) host.copy_(host.to(at::kFloat));
    return host;
  }
  Tensors on_host(const Tensors& all) const {
    Tensors result;
    for (const auto& data : all) result.push_back(on_host(data));
    return result;
  }
  Lists on_host(const Lists& all) const {
    Lists result;
    for (const auto& list : all) result.push_back(on_host(list));
    return result;
  }
  void check(const c10d::ReduceOp& op, const Tensor& data) const {
    auto kind = op.op_;
    using Kind = c10d::ReduceOp::RedOpType;
    TORCH_CHECK(kind == Kind::SUM || kind == Kind::PRODUCT || kind == Kind::MIN || kind == Kind::MAX,
                "the stand-in's backend has no such reduction");
    TORCH_CHECK(reduced.count(data.scalar_type()), "the stand-in's ", name, " reduces no ",
                data.scalar_type());
  }

  WorkPtr run(Issue issue) {
    auto& stream = CallStream::get();
    if (!stream.deferred) return issue();
    return c10::make_intrusive<StreamWork>(stream.enqueue(std::move(issue), aborted));
  }
  // Ends what waits on the stream; a message that does not come in time breaks all of gloo's.
  void abort() override {
    *aborted = true;
    Tensors none = {at::empty({1})};
    try {
      inner->recv(none, (getRank() + 1) % getSize(), 0xAB0)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
    }
  }

  const std::string getBackendName() const override { return name; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner->getBackendOptions(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& data, const c10d::BroadcastOptions& o) override {
    auto host = on_host(data);
    return run([=]() mutable { return inner->broadcast(host, o); });
  }
  WorkPtr allreduce(Tensors& data, const c10d::AllreduceOptions& o) override {
    check(o.reduceOp, data[0]);
    auto host = on_host(data);
    return run([=]() mutable { return inner->allreduce(host, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& data, const c10d::AllreduceCoalescedOptions& o) override {
    check(o.reduceOp, data[0]);
    auto host = on_host(data);
    return run([=]() mutable { return inner->allreduce_coalesced(host, o); });
  }
  WorkPtr reduce(Tensors& data, const c10d::ReduceOptions& o) override {
    check(o.reduceOp, data[0]);
    auto host = on_host(data);
    return run([=]() mutable { return inner->reduce(host, o); });
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return run([=]() mutable { return inner->allgather(to, from, o); });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return run([=]() mutable { return inner->_allgather_base(to, from, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::AllgatherOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return run([=]() mutable { return inner->allgather_into_tensor_coalesced(to, from, o); });
  }
  WorkPtr scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return run([=]() mutable { return inner->scatter(to, from, o); });
  }
  WorkPtr reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& o) override {
    check(o.reduceOp, out[0]);
    auto to = on_host(out);
    auto from = on_host(in);
    return run([=]() mutable { return inner->reduce_scatter(to, from, o); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in,
                               const c10d::ReduceScatterOptions& o) override {
    check(o.reduceOp, in);
    auto to = on_host(out), from = on_host(in);
    return run([=]() mutable { return inner->_reduce_scatter_base(to, from, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& o) override {
    check(o.reduceOp, in[0]);
    auto to = on_host(out), from = on_host(in);
    return run([=]() mutable { return inner->reduce_scatter_tensor_coalesced(to, from, o); });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return run([=]() mutable { return inner->alltoall_base(to, from, out_sizes, in_sizes, o); });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return run([=]() mutable { return inner->alltoall(to, from, o); });
  }
  WorkPtr send(Tensors& data, int dst, int) override {  // tags are ignored
    auto host = on_host(data);
    return run([=]() mutable { return inner->send(host, dst, 0); });
  }
  WorkPtr recv(Tensors& data, int src, int) override {
    auto host = on_host(data);
    return run([=]() mutable { return inner->recv(host, src, 0); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    auto plain = o;
    plain.device_ids.clear();
    return run([=]() mutable { return inner->barrier(plain); });
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> wrap(c10::intrusive_ptr<c10d::Backend> inner, std::string name,
                                       std::vector<at::ScalarType> reduced, bool narrow) {
  return c10::make_intrusive<Backend>(std::move(inner), std::move(name), reduced, narrow);
}
