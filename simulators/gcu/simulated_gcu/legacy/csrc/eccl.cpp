#include "eccl.h"

#include "views.h"

namespace simgcu {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ProcessGroup;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<ProcessGroup::Work>;

// gloo's work on the host views, with what is left to do when it is done.
class EcclWork final : public ProcessGroup::Work {
 public:
  EcclWork(int rank, OpType type, WorkPtr gloo, Tensors outputs, std::function<void()> finish)
      : Work(rank, type), gloo_(std::move(gloo)), outputs_(std::move(outputs)), finish_(std::move(finish)) {}

  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  int sourceRank() const override { return gloo_->sourceRank(); }
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }

  bool wait(std::chrono::milliseconds timeout) override {
    bool done = gloo_->wait(timeout);
    if (finish_) finish_();
    finish_ = nullptr;
    return done;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  WorkPtr gloo_;
  Tensors outputs_;
  std::function<void()> finish_;
};

class Eccl final : public ProcessGroup {
 public:
  Eccl(int rank, int size, c10::intrusive_ptr<ProcessGroup> gloo, int card)
      : ProcessGroup(rank, size), gloo_(std::move(gloo)), device_(kCard, c10::DeviceIndex(card)) {}

  const std::string getBackendName() const override { return "eccl"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = views(tensors);
    return work(OpType::BROADCAST, gloo_->broadcast(host, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = views(tensors);
    return work(OpType::ALLREDUCE, gloo_->allreduce(host, options), tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = views(tensors);
    return work(OpType::ALLREDUCE_COALESCED, gloo_->allreduce_coalesced(host, options), tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = views(tensors);
    return work(OpType::REDUCE, gloo_->reduce(host, options), tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host_outputs = views(outputs);
    auto host_inputs = views(inputs);
    return work(OpType::ALLGATHER, gloo_->allgather(host_outputs, host_inputs, options), outputs[0]);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs{output.chunk(size_)};
    Tensors inputs{input};
    return allgather(outputs, inputs, options);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(false, "simulated eccl: allgather_coalesced is not implemented; use all_gather");
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host_outputs = views(outputs);
    auto host_inputs = views(inputs);
    return work(OpType::GATHER, gloo_->gather(host_outputs, host_inputs, options), outputs.empty() ? inputs : outputs[0]);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto host_outputs = views(outputs);
    auto host_inputs = views(inputs);
    return work(OpType::SCATTER, gloo_->scatter(host_outputs, host_inputs, options), outputs);
  }
  // gloo of torch 1.10 has none: all ranks add up everything, and keep their part.
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Tensors parts;
    for (auto& tensor : inputs[0]) parts.push_back(view(tensor).reshape({-1}));
    Tensors whole{at::cat(parts)};
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    auto mine = whole[0].chunk(size_)[rank_];
    auto output = view(outputs[0]);
    return work(OpType::REDUCE_SCATTER, gloo_->allreduce(whole, all), outputs, [mine, output] {
      at::NoGradGuard no_grad;
      Tensor target = output;
      target.copy_(mine.view(target.sizes()));
    });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto host = views(tensors);
    return work(OpType::SEND, gloo_->send(host, rank, tag), {});
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto host = views(tensors);
    return work(OpType::RECV, gloo_->recv(host, rank, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto host = views(tensors);
    return work(OpType::RECVANYSOURCE, gloo_->recvAnysource(host, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  // gloo's view of a tensor, whose value must be there.
  Tensor view(const Tensor& tensor) {
    TORCH_CHECK(on_card(tensor), "eccl: tensors must lie on a card, got one on ", tensor.device(),
                "; move it there, or make a gloo group of torch.distributed beside this one");
    TORCH_CHECK(tensor.device() == device_, "eccl: rank ", rank_, " communicates from ", device_, ", got a tensor on ",
                tensor.device(), "; LOCAL_RANK says which card it is");
    TORCH_CHECK(tensor.is_contiguous(), "eccl: tensors must be contiguous");
    run(tensor);
    return host_view(tensor, /*owning=*/true);
  }
  Tensors views(const Tensors& tensors) {
    Tensors host;
    for (auto& tensor : tensors) host.push_back(view(tensor));
    return host;
  }
  std::vector<Tensors> views(const std::vector<Tensors>& lists) {
    std::vector<Tensors> host;
    for (auto& tensors : lists) host.push_back(views(tensors));
    return host;
  }
  WorkPtr work(OpType type, WorkPtr gloo, Tensors outputs, std::function<void()> finish = nullptr) {
    return c10::make_intrusive<EcclWork>(rank_, type, std::move(gloo), std::move(outputs), std::move(finish));
  }

  c10::intrusive_ptr<ProcessGroup> gloo_;
  c10::Device device_;
};

}  // namespace

c10::intrusive_ptr<ProcessGroup> make_eccl(int rank, int size, c10::intrusive_ptr<ProcessGroup> gloo, int card) {
  check_card(card);
  return c10::make_intrusive<Eccl>(rank, size, std::move(gloo), card);
}

}  // namespace simgcu
