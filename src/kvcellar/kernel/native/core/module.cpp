// The Python module: levels, threads, and what the other rooms bind.

#include <nanobind/stl/vector.h>

#include "core/binding.h"
#include "core/levels.h"
#include "core/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcellar {

void bind_levels(nb::module_& m) {
  nb::enum_<Dtype>(m, "Dtype", "Storage types. Queries, new rows and results have one of the first three.")
      .value("float32", Dtype::f32)
      .value("bfloat16", Dtype::bf16)
      .value("float16", Dtype::f16)
      .value("int8", Dtype::int8)
      .value("int4", Dtype::int4);

  nb::enum_<Level>(m, "Level", "Instruction sets that the kernel is written for.")
      .value("scalar", Level::scalar)
      .value("neon", Level::neon)
      .value("avx2", Level::avx2)
      .value("avx_vnni", Level::avx_vnni)
      .value("vnni", Level::vnni)
      .value("bf16", Level::bf16)
      .value("amx", Level::amx);
  m.def("levels", &levels, "Return the levels that this machine and this build have, the best first.");
  m.def("level", &level, "Return the level in use.");
  m.def("set_level", &set_level, "level"_a,
        "Use another level from the next call on.\n\nRaises:\n    ConfigError: this machine or this build does not "
        "have it.");

  nb::enum_<Threads>(m, "Threads", "Whose threads the kernel runs on.")
      .value("openmp", Threads::openmp)
      .value("given", Threads::given)
      .value("own", Threads::own);
  m.def("set_num_threads", &set_num_threads, "n"_a,
        "Use up to n threads; 0: as many as OpenMP, which torch is set by, or one per core.");
  m.def("num_threads", &num_threads, "Return how many threads the next call may use.");
  m.def("threads_of", &threads_of, "Return whose threads they are.");
  m.def(
      "set_parallel_for", [](uintptr_t address) { set_parallel_for(reinterpret_cast<ParallelFor>(address)); },
      "address"_a,
      "Use another runtime's threads.\n\n"
      "Args:\n"
      "    address: of a C function ``void(int n_workers, void (*work)(void*, int), void* data)``\n"
      "        that calls ``work(data, i)`` for each worker i and returns when all have; 0: ours\n"
      "        again.");
  m.def(
      "stream_read",
      [](uintptr_t data, int64_t n_bytes) {
        const nb::gil_scoped_release release;
        return stream_read(at<const void>(data), n_bytes, 0);
      },
      "data"_a, "n_bytes"_a, "Read memory with all threads and nothing else; return the sum of its floats.");
}

}  // namespace kvcellar

NB_MODULE(_native, m) {
  m.doc() = "The compiled CPU kernel. Addresses are integers; nothing keeps what they point to alive.";
  nb::set_leak_warnings(false);
  static const nb::object config_error = nb::module_::import_("kvcellar.errors").attr("ConfigError");
  nb::register_exception_translator(
      [](const std::exception_ptr& raised, void* type) {
        try {
          std::rethrow_exception(raised);
        } catch (const kvcellar::ConfigError& error) {
          PyErr_SetString(static_cast<PyObject*>(type), error.what());
        }
      },
      config_error.ptr());
  kvcellar::bind_levels(m);
  kvcellar::bind_attend(m);
  kvcellar::bind_linear(m);
  kvcellar::bind_layers(m);
  kvcellar::bind_experts(m);
  kvcellar::bind_recurrent(m);
}
