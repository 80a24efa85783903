// The process group `eccl`: tensors of cards only, carried by gloo as host views of the card's memory.
#include "eccl.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <unistd.h>

#include <mutex>

#include "runtime.h"

namespace simgcu {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Future = c10::ivalue::Future;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using After = std::function<void()>;

// Gloo's work on host views, as work on the card's tensors; `after` finishes what gloo lacks.
struct EcclWork final : c10d::Work {
  EcclWork(int rank, OpType type, WorkPtr inner, Tensors outputs, After after)
      : Work(rank, type), inner_(std::move(inner)), outputs_(std::move(outputs)) {
    c10::intrusive_ptr<Future> done;
    try {
      done = inner_->getFuture();
    } catch (const std::exception&) {
      return;  // gloo's point-to-point work has none
    }
    if (!done) return;
    chained_ = true;
    done->addCallback([future = future_, outputs = outputs_, after](Future& finished) {
      if (finished.hasError()) return future->setError(finished.exception_ptr());
      try {
        if (after) after();
        future->markCompleted(c10::IValue(outputs));
      } catch (...) {
        future->setError(std::current_exception());
      }
    });
  }
  bool isCompleted() override { return chained_ ? future_->completed() : inner_->isCompleted(); }
  bool isSuccess() const override {
    return chained_ ? future_->completed() && !future_->hasError() : inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return chained_ && future_->hasError() ? future_->exception_ptr() : inner_->exception();
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  Tensors result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = inner_->wait(timeout);  // gloo's own timeout and error text
    if (chained_) future_->waitAndThrow();
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<Future> getFuture() override {
    if (!chained_) {
      wait(kNoTimeout);
      future_->markCompleted(c10::IValue(outputs_));
      chained_ = true;
    }
    return future_;
  }

 private:
  WorkPtr inner_;
  Tensors outputs_;
  c10::intrusive_ptr<Future> future_ = c10::make_intrusive<Future>(c10::ListType::ofTensors());
  bool chained_ = false;
};

Tensors flat(const Lists& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

struct ProcessGroupECCL final : c10d::Backend {
  struct Named : Options {
    using Options::Options;
  };

  ProcessGroupECCL(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)),
        options_(c10::make_intrusive<Named>("eccl")) {
    TORCH_CHECK(device_count() > 0, "ProcessGroupECCL is only supported with GCUs, no GCUs found!");
    init();
  }
  const std::string getBackendName() const override { return "eccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = host(tensors);
    return work(OpType::BROADCAST, gloo_->broadcast(views, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(options.reduceOp);
    auto views = host(tensors);
    for (auto& view : views) narrow_on_wire(view);
    auto theirs = options;
    auto after = average(theirs.reduceOp, views);
    return work(OpType::ALLREDUCE, gloo_->allreduce(views, theirs), tensors, after);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    check(options.reduceOp);
    auto views = host(tensors);
    for (auto& view : views) narrow_on_wire(view);
    auto theirs = options;
    auto after = average(theirs.reduceOp, views);
    return work(OpType::ALLREDUCE_COALESCED, gloo_->allreduce_coalesced(views, theirs), tensors, after);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(options.reduceOp);
    auto views = host(tensors);
    for (auto& view : views) narrow_on_wire(view);
    auto theirs = options;
    auto after = average(theirs.reduceOp, views);
    return work(OpType::REDUCE, gloo_->reduce(views, theirs), tensors, options.rootRank == rank_ ? after : nullptr);
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return work(OpType::ALLGATHER, gloo_->allgather(to, from, options), flat(outputs));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = host(output), from = host(input);
    return work(OpType::_ALLGATHER_BASE, gloo_->_allgather_base(to, from, options), {output});
  }
  WorkPtr allgather_coalesced(Lists&, Tensors&, const c10d::AllgatherOptions&) override { return lacking("allgather_coalesced"); }
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override {
    return lacking("allgather_into_tensor_coalesced");
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return work(OpType::GATHER, gloo_->gather(to, from, options), flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto to = host(outputs);
    auto from = host(inputs);
    return work(OpType::SCATTER, gloo_->scatter(to, from, options), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "eccl: reduce_scatter takes one tensor per rank");
    Tensors parts;
    for (auto& part : host(inputs[0])) parts.push_back(part.reshape({-1}));
    return reduce_then_keep_share(outputs[0], at::cat(parts), options);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduce_then_keep_share(output, host(input).clone().contiguous(), options);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto to = host(output), from = host(input);
    return work(OpType::ALLTOALL_BASE, gloo_->alltoall_base(to, from, output_sizes, input_sizes, options), {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto to = host(outputs), from = host(inputs);
    std::vector<int64_t> output_sizes, input_sizes;
    Tensors pieces;
    int64_t total = 0;
    for (auto& tensor : to) {
      output_sizes.push_back(tensor.numel());
      total += tensor.numel();
    }
    for (auto& tensor : from) {
      input_sizes.push_back(tensor.numel());
      pieces.push_back(tensor.reshape({-1}));
    }
    auto sent = at::cat(pieces);
    auto received = at::empty({total}, sent.options());
    auto inner = gloo_->alltoall_base(received, sent, output_sizes, input_sizes, options);
    return work(OpType::ALLTOALL, inner, outputs, [to, received] {
      at::NoGradGuard no_grad;
      int64_t position = 0;
      for (Tensor target : to) {
        target.copy_(received.narrow(0, position, target.numel()).view(target.sizes()));
        position += target.numel();
      }
    });
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    auto views = host(tensors);
    return work(OpType::SEND, gloo_->send(views, destination, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto views = host(tensors);
    return work(OpType::RECV, gloo_->recv(views, source, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto views = host(tensors);
    return work(OpType::RECVANYSOURCE, gloo_->recvAnysource(views, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return work(OpType::BARRIER, gloo_->barrier(options), {});
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Named> options_;
  std::mutex mutex_;
  bool checked_ = false;

  WorkPtr lacking(const char* name) { TORCH_CHECK_NOT_IMPLEMENTED(false, "ProcessGroupECCL does not support ", name); }

  // The reductions of the card's library: it has averages from 2.10 on, and never those of bits.
  static void check(const ReduceOp& op) {
    static const bool averages = [] {
      const char* version = getenv("SIM_GCU_ECCL_VERSION");
      int major = 2, minor = 9;
      if (version) sscanf(version, "%d.%d", &major, &minor);
      return major > 2 || (major == 2 && minor >= 10);
    }();
    TORCH_CHECK_VALUE(op != ReduceOp::AVG || averages, "Cannot use ReduceOp.AVG with ECCL before 2.10; take the sum, and divide it");
    TORCH_CHECK_VALUE(op != ReduceOp::BAND && op != ReduceOp::BOR && op != ReduceOp::BXOR && op != ReduceOp::PREMUL_SUM,
                      "Cannot use ReduceOp.BAND, BOR, BXOR or PREMUL_SUM with ECCL");
  }

  // As the card's library does: only tensors of a card, and no two ranks on one.
  void check(const Tensor& tensor) {
    TORCH_CHECK_VALUE(on_card(tensor) && tensor.layout() == at::kStrided, "Tensors must be GCU and dense");
    TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
    std::lock_guard<std::mutex> lock(mutex_);
    if (checked_) return;
    checked_ = true;
    char host_name[256] = {0};
    gethostname(host_name, 255);
    auto mine = std::string(host_name) + "/" + std::to_string(physical_index(tensor.device().index()));
    store_->set("eccl/card/" + std::to_string(rank_), std::vector<uint8_t>(mine.begin(), mine.end()));
    for (int other = 0; other < size_; ++other) {
      auto theirs = store_->get("eccl/card/" + std::to_string(other));
      TORCH_CHECK(other == rank_ || std::string(theirs.begin(), theirs.end()) != mine, "Duplicate GCU detected : rank ",
                  rank_, " and rank ", other, " both on GCU device ", mine);
    }
  }
  Tensor host(const Tensor& tensor) {
    check(tensor);
    return host_view(tensor, true);
  }
  Tensors host(const Tensors& tensors) {
    Tensors views;
    for (auto& tensor : tensors) views.push_back(host(tensor));
    return views;
  }
  Lists host(const Lists& lists) {
    Lists views;
    for (auto& list : lists) views.push_back(host(list));
    return views;
  }
  // 64-bit numbers travel as 32-bit ones, even where the card has kernels for them.
  static void narrow_on_wire(Tensor view) {
    if (view.scalar_type() != at::kLong && view.scalar_type() != at::kDouble) return;
    at::NoGradGuard no_grad;
    view.copy_(view.to(view.scalar_type() == at::kLong ? at::kInt : at::kFloat));
  }
  WorkPtr work(OpType type, WorkPtr inner, Tensors outputs, After then = {}) {
    Tensors wide;
    for (auto& tensor : outputs)
      if (tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kDouble) wide.push_back(host_view(tensor, true));
    auto after = wide.empty() ? then : After([then, wide] {
      if (then) then();
      for (auto& view : wide) narrow_on_wire(view);
    });
    return c10::make_intrusive<EcclWork>(rank_, type, std::move(inner), std::move(outputs), std::move(after));
  }
  // Gloo has no average: a sum, divided afterwards.
  After average(ReduceOp& op, Tensors views) {
    if (op != ReduceOp::AVG) return {};
    op = ReduceOp::SUM;
    return [views, size = size_] {
      at::NoGradGuard no_grad;
      for (auto view : views) view.div_(size);
    };
  }
  // Gloo has no reduce_scatter: everything is reduced, and this rank keeps its share.
  WorkPtr reduce_then_keep_share(const Tensor& output, Tensor whole, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions theirs;
    check(options.reduceOp);
    narrow_on_wire(whole);
    theirs.reduceOp = options.reduceOp;
    theirs.timeout = options.timeout;
    Tensors views{whole};
    auto after = average(theirs.reduceOp, views);
    auto target = host(output);
    auto inner = gloo_->allreduce(views, theirs);
    return work(OpType::REDUCE_SCATTER, inner, {output}, [after, whole, target, rank = rank_, size = size_] {
      if (after) after();
      at::NoGradGuard no_grad;
      auto share = whole.numel() / size;
      Tensor to = target;
      to.copy_(whole.view({-1}).narrow(0, rank * share, share).view(to.sizes()));
    });
  }
};

// DDP's logger wants a timer for each type of device.
struct CardTimer final : c10d::Timer {
  explicit CardTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = getTimestamp(start), last = getTimestamp(end);
    if (!first || !last) return std::nullopt;
    return *last - *first;
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_eccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                            c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<ProcessGroupECCL>(std::move(store), rank, size, std::move(gloo));
}

}  // namespace simgcu

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, simgcu::kGCU, simgcu::CardTimer);
}
