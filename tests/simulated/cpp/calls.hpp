// The calls of operators that were met before, answered at once; any other goes on to the mode in Python.

#pragma once

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include "card.hpp"

using torch::jit::Stack;

constexpr auto OURS = c10::DispatchKey::TESTING_ONLY_GenericMode;
const c10::DispatchKeySet HIDDEN({OURS, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

struct Place {  // a region by whose it is, wherever that lies
  int64_t number, offset, nbytes;
};

struct Price {  // what the kernel of a call does
  Name name;
  std::vector<Place> reads, writes;
  double flops;
  Name dtype;
  bool workspace;
};

struct Output {
  int64_t same = -1;  // the number of the tensor that it is,
  int64_t of = -1;    // or at whose storage it looks; else it has one of its own
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t nbytes = 0;  // of a storage of its own
};

struct Call {  // what a call does that is like another
  Card* card;
  std::vector<Output> outputs;
  bool listed;
  std::optional<Price> price;
};

struct Held {
  std::shared_ptr<Allocator> memory;
  Block* block;
};

void let_go(void* context) {
  auto* held = static_cast<Held*>(context);
  held->memory->free(held->block);
  delete held;
}

at::Tensor laid(c10::intrusive_ptr<c10::TensorImpl> impl, const Output& output) {
  impl->set_sizes_and_strides(output.sizes, output.strides, output.offset);
  return at::Tensor(std::move(impl));
}

at::Tensor fresh(const Output& output, Card& card) {
  auto& pool = card.queue->capture != nullptr ? card.queue->capture->pool : card.queue->pool;
  auto* held = new Held{card.memory, card.memory->allocate(output.nbytes, pool)};
  c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(card.index));
  c10::DataPtr data(reinterpret_cast<void*>(held->block->address), held, &let_go, device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), output.nbytes, std::move(data), nullptr, false);
  return laid(
      c10::make_intrusive<c10::TensorImpl>(
          c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          c10::scalarTypeToTypeMeta(output.dtype)),
      output);
}

at::Tensor view(const at::Tensor& base, const Output& output) {
  auto keys = base.key_set().remove(c10::DispatchKey::Python);
  return laid(
      c10::make_intrusive<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys, c10::scalarTypeToTypeMeta(output.dtype)),
      output);
}

int64_t address(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl()->data());
}

// Give memory to what is new, and launch the kernel. `tensors` are those that the call was given.
void perform(const Call& call, std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& made) {
  size_t given = tensors.size();
  for (const Output& output : call.outputs) {
    if (output.same >= 0)
      made.push_back(tensors[output.same]);
    else if (output.of >= 0)
      made.push_back(view(tensors[output.of], output));
    else
      made.push_back(fresh(output, *call.card));
  }
  if (!call.price) return;
  Card& card = *call.card;
  const Price& price = *call.price;
  auto workspace = price.workspace ? std::optional<Region>(card.workspace()) : std::nullopt;
  auto regions = [&](const std::vector<Place>& places) {
    std::vector<Region> found;
    found.reserve(places.size());
    for (const Place& place : places) {
      size_t at = place.number;
      found.emplace_back(address(at < given ? tensors[at] : made.at(at - given)) + place.offset, place.nbytes);
    }
    return found;
  };
  card.launch({price.name, regions(price.reads), regions(price.writes), price.flops, price.dtype, 0.0, workspace});
}

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t found = key.size();
    for (int64_t part : key) found = (found ^ static_cast<uint64_t>(part)) * 0x9E3779B97F4A7C15ull + (found >> 29);
    return found;
  }
};

struct Operator {  // by the identity of its schema
  bool composite;  // itself in other operators,
  bool whole;      // unless one kernel all the same
  bool ours;       // answered in Python even on the host
  bool random;     // asks the default generator; attention does so only with dropout
};

struct Known {  // of calls
  PyObject* mode;
  Host& host;
  std::vector<Card*> cards;
  std::set<std::string> whole, ours;  // names of operators
  int64_t current = 0;                // the card that `cuda` means
  std::unordered_map<const void*, Operator> operators;
  std::unordered_map<Key, Call, KeyHash> calls;
  std::optional<Call> learned;

  const Operator& about(const c10::OperatorHandle& op) {
    const void* key = &op.schema();
    auto found = operators.find(key);
    if (found != operators.end()) return found->second;
    const auto& name = op.operator_name().name;
    bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
        !name.starts_with("prim::");
    bool random = op.hasTag(at::Tag::nondeterministic_seeded) && name.find("attention") == std::string::npos &&
        name.find("sdp") == std::string::npos;
    return operators[key] = {composite, whole.count(name) != 0, ours.count(name) != 0, random};
  }
};

Known* known = nullptr;  // one at a time, on the thread that began it

// What tells a call from others, and the tensors in it.
struct Reading {
  Key key;
  std::vector<at::Tensor> tensors;
  int64_t card = -1;  // whose tensor or device comes first; -1 where none is named
  bool on_card = false, asks_for_card = false, names_device = false, of_python = false, alike = true;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return key.push_back(1);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a number of Python's, and one again in Python
      c10::impl::ExcludeDispatchKeyGuard hidden(HIDDEN);
      return add(c10::IValue(tensor.item()));
    }
    tensors.push_back(tensor);
    bool python = tensor.key_set().has(c10::DispatchKey::Python);
    of_python |= python;
    if (python) return;
    if (tensor.device().type() == c10::DeviceType::CUDA) {
      on_card = true;
      if (card < 0) card = tensor.device().index();
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    key.insert(key.end(), {2, impl->dim(), impl->storage_offset(), static_cast<int64_t>(tensor.scalar_type()),
                           static_cast<int64_t>(tensor.device().type()), tensor.device().index()});
    for (int64_t size : impl->sizes()) key.push_back(size);
    for (int64_t stride : impl->strides()) key.push_back(stride);
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isNone()) return key.push_back(3);
    if (value.isInt()) return key.insert(key.end(), {4, value.toInt()}), void();
    if (value.isDouble()) {
      double number = value.toDouble();
      int64_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      return key.insert(key.end(), {5, bits}), void();
    }
    if (value.isBool()) return key.insert(key.end(), {6, value.toBool()}), void();
    if (value.isString()) {
      const auto& text = value.toStringRef();
      key.insert(key.end(), {7, static_cast<int64_t>(text.size())});
      key.insert(key.end(), text.begin(), text.end());
      return;
    }
    if (value.isDevice()) {
      auto device = value.toDevice();
      names_device = true;
      if (device.type() == c10::DeviceType::CUDA) {
        asks_for_card = true;
        if (card < 0) card = device.index();
      }
      return key.insert(key.end(), {8, static_cast<int64_t>(device.type()), device.index()}), void();
    }
    if (value.isTensorList()) {
      const auto tensors = value.toTensorList();
      key.insert(key.end(), {9, static_cast<int64_t>(tensors.size())});
      for (const at::Tensor& tensor : tensors) add(tensor);
      return;
    }
    if (value.isList()) {
      auto list = value.toListRef();
      key.insert(key.end(), {10, static_cast<int64_t>(list.size())});
      for (const c10::IValue& each : list) add(each);
      return;
    }
    alike = false;  // cannot be told apart
  }
};

bool in_mode() {
  using TLS = c10::impl::TorchDispatchModeTLS;
  int64_t depth = TLS::stack_len();
  return known != nullptr && depth > 0 && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python) &&
      TLS::get_stack_at(depth - 1)->ptr(getPyInterpreter()) == known->mode;
}

void on_host(const c10::OperatorHandle& op, Stack* stack) {
  known->host.operators += 1;
  known->host.advance(known->cards[0]->speeds.host_operator_s);
  c10::impl::ExcludeDispatchKeyGuard hidden(HIDDEN);
  op.callBoxed(stack);
}

void give_back(const c10::OperatorHandle& op, Stack* stack, const Call& call, const std::vector<at::Tensor>& made) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  if (call.listed)
    stack->emplace_back(made);
  else
    for (const at::Tensor& tensor : made) stack->emplace_back(tensor);
}

void called(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, OURS);
  if (!in_mode()) return op.redispatchBoxed(below, stack);
  const Operator about = known->about(op);
  Reading reading;
  reading.key.reserve(64);
  reading.key.push_back(reinterpret_cast<int64_t>(&op.schema()));
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) reading.add(value);
  // As torch has it: autograd takes these apart before a mode sees them. A whole one has nothing for it without gradients.
  bool whole = about.whole && !c10::GradMode::is_enabled();
  bool taken_apart = about.composite && !c10::InferenceMode::is_enabled() && !whole;
  if (reading.of_python || about.ours || taken_apart) return op.redispatchBoxed(below, stack);
  if (!reading.on_card && !reading.asks_for_card) {
    if (reading.names_device || reading.tensors.empty()) return op.redispatchBoxed(below, stack);
    return on_host(op, stack);
  }
  if (about.random) {
    Card& card = *known->cards[reading.card < 0 ? known->current : reading.card];
    TORCH_CHECK(
        !card.generator_captures || card.queue->capture != nullptr,
        "Offset increment outside graph capture encountered unexpectedly.");
  }
  if (about.composite && !about.whole)
    return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  if (reading.tensors.empty()) reading.key.push_back(known->current);
  else if (reading.tensors[0].scalar_type() == c10::ScalarType::Float)
    reading.key.push_back(at::globalContext().allowTF32CuBLAS());
  if (reading.alike) {
    auto found = known->calls.find(reading.key);
    if (found != known->calls.end()) {
      std::vector<at::Tensor> made;
      perform(found->second, reading.tensors, made);
      return give_back(op, stack, found->second, made);
    }
  }
  known->learned.reset();
  op.redispatchBoxed(whole ? below - c10::autograd_dispatch_keyset_with_ADInplaceOrView : below, stack);
  if (reading.alike && known->learned) known->calls.emplace(std::move(reading.key), std::move(*known->learned));
  known->learned.reset();
}

