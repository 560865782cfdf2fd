// A card of known truth and its host, for Python. The rest is in the headers beside this.
//
// Tensors of a card are torch's own, on `cuda`, with an address and no memory behind it. A fallback above torch's own
// dispatch keys sees each call of an operator; one with tensors that lie as those of an earlier call is answered at
// once, any other goes on to the mode in Python, which works out what it gives and what its kernel does.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "calls.hpp"

namespace {

c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;

void begin(Known& begun) {
  TORCH_CHECK(known == nullptr, "cards are simulated already");
  known = &begun;
  c10::impl::tls_set_dispatch_key_included(OURS, true);
}

void end() {
  c10::impl::tls_set_dispatch_key_included(OURS, false);
  known = nullptr;
}

// Whether calls are looked at here; within a mode's own answers torch sees to it that they are not.
bool look(bool wanted) {
  bool before = !c10::impl::tls_is_dispatch_key_excluded(OURS);
  c10::impl::tls_set_dispatch_key_excluded(OURS, !wanted);
  return before;
}

std::vector<at::Tensor> performed(const Call& call, std::vector<at::Tensor> tensors) {
  std::vector<at::Tensor> made;
  perform(call, tensors, made);
  return made;
}

// Let a tensor look at a storage.
void lay(
    const at::Tensor& tensor, const c10::Storage& storage, int64_t offset, const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(sizes, strides, offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&called>());
}

PYBIND11_MODULE(native, module) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);

  py::class_<Host>(module, "Host")
      .def(py::init<>())
      .def_readwrite("now_s", &Host::now_s)
      .def_readwrite("operators", &Host::operators)
      .def_readwrite("wake_s", &Host::wake_s)
      .def_readwrite("wake", &Host::wake)
      .def("advance", &Host::advance)
      .def("wait_until", &Host::wait_until);

  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool");
  py::class_<Allocator, std::shared_ptr<Allocator>>(module, "Allocator")
      .def(py::init<int64_t, int64_t>())
      .def_readonly("total_bytes", &Allocator::total_bytes)
      .def_readonly("allocated", &Allocator::allocated)
      .def_readonly("reserved", &Allocator::reserved)
      .def_readwrite("peak_allocated", &Allocator::peak_allocated)
      .def_property_readonly("driver_free", &Allocator::driver_free)
      .def_readwrite("on_allocate", &Allocator::on_allocate)
      .def_property_readonly("captures", [](const Allocator& memory) { return memory.captures_underway.size(); })
      .def("release", &Allocator::release, py::arg("pool") = std::nullopt)
      .def("share", &Allocator::share)
      .def("begin_capture", &Allocator::begin_capture)
      .def("end_capture", &Allocator::end_capture)
      .def("release_pool", &Allocator::release_pool)
      .def("users", &Allocator::users)
      .def("reserved_by_pool", [](const Allocator& memory) {
        std::map<PoolId, int64_t> found;
        for (const auto& [id, pool] : memory.private_pools) found[id] = pool->reserved;
        return found;
      });

  py::class_<Speeds>(module, "Speeds")
      .def(py::init<double, double, double, double, double, double, std::map<std::string, double>,
                    std::vector<std::pair<std::string, double>>>())
      .def("duration_s", &Speeds::duration_s);

  py::class_<Clock>(module, "Clock").def(
      py::init([](double after_busy_s, double busy_share, double after_computing_s, double capped_share,
                  double dip_share, double settles_s) {
        return Clock{after_busy_s, busy_share, after_computing_s, capped_share, dip_share, settles_s};
      }));

  py::class_<Recording>(module, "Recording")
      .def(py::init<>())
      .def_readwrite("invalid", &Recording::invalid)
      .def_readwrite("pool", &Recording::pool);

  py::class_<Queue>(module, "Queue")
      .def(py::init<>())
      .def_readwrite("ready_s", &Queue::ready_s)
      .def("unused_bytes", [](const Queue& queue, const Allocator& memory) {
        int64_t found = 0;
        for (const auto& [shelf, blocks] : memory.free_blocks)
          if (shelf.first == queue.pool)
            for (const auto& [region, block] : blocks) found += region.first;
        return found;
      })
      .def("free_workspace", [](Queue& queue, Allocator& memory) {
        if (queue.workspace != nullptr) memory.free(queue.workspace);
        queue.workspace = nullptr;
      })
      .def_readwrite("capture", &Queue::capture);

  py::class_<Card>(module, "Card")
      .def(py::init([](int64_t index, Host& host, Speeds speeds, Clock clock,
                       int64_t workspace_bytes, int64_t l2_bytes, bool writes_back,
                       std::shared_ptr<Allocator> memory) {
             return new Card(
                 index, host, std::move(speeds), std::move(clock), workspace_bytes, {l2_bytes, writes_back},
                 std::move(memory));
           }),
           py::keep_alive<1, 3>())
      .def_readonly("index", &Card::index)
      .def_readonly("memory", &Card::memory)
      .def_property_readonly("busy_s", [](const Card& card) { return card.clock.busy_s; })
      .def_readonly("memory_bytes", &Card::memory_bytes)
      .def_readonly("computing_s", &Card::computing_s)
      .def_readwrite("queue", &Card::queue)
      .def_readwrite("generator_captures", &Card::generator_captures)
      .def_readwrite("on_kernel", &Card::on_kernel)
      .def_property_readonly("clock_share", [](const Card& card) { return card.clock.share_at(card.host.now_s); })
      .def("active_share", &Card::active_share)
      .def("replay", &Card::replay)
      .def("value", [](const Card& card, const Region& region) { return card.values.get(region); })
      .def("set_value", [](Card& card, const Region& region, std::optional<double> value) {
        if (card.queue->capture != nullptr) return;  // nothing runs yet
        if (value) card.values.set(region, *value);
        else card.values.forget(region);
      }, py::arg("region"), py::arg("value").none(true))
      .def("launch", [](Card& card, const std::string& name, double link_s) {
        card.launch({interned(name), {}, {}, 0.0, interned(""), link_s});
      }, py::arg("name"), py::arg("link_s") = 0.0);

  py::class_<Output>(module, "Output")
      .def(py::init([](int64_t same, int64_t of, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                       int64_t offset, c10::ScalarType dtype, int64_t nbytes) {
        return Output{same, of, std::move(sizes), std::move(strides), offset, dtype, nbytes};
      }))
      .def_property_readonly("is_fresh", [](const Output& output) { return output.same < 0 && output.of < 0; });

  py::class_<Call>(module, "Call")
      .def(py::init([](Card* card, std::vector<Output> outputs, bool listed, const py::object& price) {
             Call call{card, std::move(outputs), listed, std::nullopt};
             if (price.is_none()) return call;
             auto places = [&](const char* name) {
               std::vector<Place> found;
               for (const auto& each : price.attr(name)) {
                 auto [number, offset, nbytes] = each.cast<std::tuple<int64_t, int64_t, int64_t>>();
                 found.push_back({number, offset, nbytes});
               }
               return found;
             };
             call.price = Price{
                 interned(price.attr("name").cast<std::string>()), places("reads"), places("writes"),
                 price.attr("flops").cast<double>(), interned(price.attr("dtype").cast<std::string>()),
                 price.attr("workspace").cast<bool>()};
             return call;
           }));

  py::class_<Known>(module, "Known")
      .def(py::init([](const py::object& mode, Host& host, std::vector<Card*> cards, std::set<std::string> whole,
                       std::set<std::string> ours) {
             return new Known{mode.ptr(), host, std::move(cards), std::move(whole), std::move(ours)};
           }),
           py::keep_alive<1, 3>())
      .def_readwrite("current", &Known::current)
      .def("learn", [](Known& self, const Call& call) { self.learned = call; });

  module.def("begin", &begin);
  module.def("end", &end);
  module.def("look", &look);
  module.def("performed", &performed);
  module.def("lay", &lay);
}
