// Python binding of the arena. It checks chunks, ranks and sizes. `Arena` itself checks no
// arguments, only the indices that it reads from the shared memory.

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arena.hpp"

namespace nb = nanobind;

namespace {

using namespace paceline;

using Bytes = nb::ndarray<nb::numpy, std::uint8_t>;
using SegmentTuple = std::tuple<std::size_t, std::size_t, DType>;

// A numpy array that refers to a mapping, and keeps the mapping alive.
Bytes view(const std::shared_ptr<Mapping>& mapping, char* data, std::vector<std::size_t> shape) {
    using Owner = std::shared_ptr<Mapping>;
    auto owner = std::make_unique<Owner>(mapping);
    nb::capsule capsule(owner.get(), [](void* kept) noexcept { delete static_cast<Owner*>(kept); });
    owner.release();
    return Bytes(data, shape.size(), shape.data(), capsule);
}

std::size_t arena_nbytes(std::size_t num_ranks, std::size_t slot_nbytes, std::size_t max_chunks,
                         std::size_t num_flags) {
    return Layout(num_ranks, slot_nbytes, max_chunks, num_flags, page_nbytes()).nbytes;
}

void construct(Arena* arena, int fd, std::size_t rank, std::size_t num_ranks,
               std::size_t slot_nbytes, std::size_t max_chunks, std::size_t num_flags, double scale,
               bool held, bool own_core, bool spare_core) {
    if (rank >= num_ranks || slot_nbytes == 0) {
        throw nb::value_error("rank must be less than num_ranks, and slot_nbytes positive");
    }
    const Layout layout(num_ranks, slot_nbytes, max_chunks, num_flags, page_nbytes());
    auto shared = std::make_shared<Mapping>(fd, 0, layout.nbytes, Mapping::Kind::shared);
    auto results = std::make_shared<Mapping>(fd, static_cast<off_t>(layout.results),
                                             2 * layout.slot_stride, Mapping::Kind::copy_on_write);
    new (arena) Arena(std::move(shared), std::move(results), rank, layout,
                      {scale, held, own_core, spare_core});
}

Segment checked(const SegmentTuple& tuple, std::size_t slot_nbytes) {
    const auto [offset, count, dtype] = tuple;
    const std::size_t element = size_of(dtype);
    if (offset % element != 0) throw nb::value_error("a segment's offset must be aligned");
    if (offset > slot_nbytes || count > (slot_nbytes - offset) / element) {
        throw nb::value_error("a segment must be inside the slot");
    }
    return {offset, count, dtype};
}

void set_chunks(Arena& arena, const std::vector<std::vector<SegmentTuple>>& chunks) {
    if (chunks.size() > arena.layout().max_chunks) {
        throw nb::value_error("there must be at most max_chunks chunks");
    }
    std::vector<Chunk> cuts;
    for (const auto& tuples : chunks) {
        std::vector<Segment> segments;
        for (const auto& tuple : tuples) {
            segments.push_back(checked(tuple, arena.layout().slot_nbytes));
        }
        cuts.push_back(cut(segments, arena.layout().num_ranks));
    }
    arena.set_chunks(std::move(cuts));
}

void check_chunk(const Arena& arena, std::size_t chunk) {
    if (chunk >= arena.num_chunks()) throw nb::index_error("chunk is out of range");
}

void check_rank(const Arena& arena, std::size_t rank) {
    if (rank >= arena.layout().num_ranks) throw nb::index_error("rank is out of range");
}

void check_range(const Arena& arena, std::size_t offset, std::size_t nbytes) {
    const std::size_t slot_nbytes = arena.layout().slot_nbytes;
    if (offset > slot_nbytes || nbytes > slot_nbytes - offset) {
        throw nb::value_error("the values must be inside the slot");
    }
}

// Copy values to a rank's slot. A source is (offset in the slot, address, number of bytes).
void copy_in(const Arena& arena, std::size_t rank,
             const std::vector<std::tuple<std::size_t, std::uintptr_t, std::size_t>>& sources) {
    check_rank(arena, rank);
    for (const auto& [offset, source, nbytes] : sources) check_range(arena, offset, nbytes);
    const nb::gil_scoped_release released;
    for (const auto& [offset, source, nbytes] : sources) {
        copy(fastest_kernels(), arena.slot(rank) + offset, reinterpret_cast<const void*>(source),
             nbytes);
    }
}

void copy_out(const Arena& arena, std::size_t parity, std::size_t offset, std::uintptr_t target,
              std::size_t nbytes) {
    check_range(arena, offset, nbytes);
    const nb::gil_scoped_release released;
    copy(fastest_kernels(), reinterpret_cast<void*>(target), arena.result(parity % 2) + offset,
         nbytes);
}

void bind_memory(nb::class_<Arena>& arena) {
    arena
        .def("slot",
             [](const Arena& self, std::size_t rank) {
                 check_rank(self, rank);
                 return view(self.shared(), self.slot(rank), {self.layout().slot_nbytes});
             })
        .def("shared_result",
             [](const Arena& self, std::size_t parity) {
                 return view(self.shared(), self.result(parity % 2), {self.layout().slot_nbytes});
             })
        .def("result",
             [](const Arena& self, std::size_t parity) {
                 char* data = self.results()->data() + parity % 2 * self.layout().slot_stride;
                 return view(self.results(), data, {self.layout().slot_nbytes});
             })
        .def("flags",
             [](const Arena& self) {
                 const Layout& layout = self.layout();
                 char* data = self.shared()->data() + layout.flags;
                 return view(self.shared(), data, {2, layout.num_ranks, layout.num_flags});
             })
        .def("refresh",
             [](const Arena& self, std::size_t parity) {
                 const std::size_t stride = self.layout().slot_stride;
                 const nb::gil_scoped_release released;
                 return self.results()->refresh(parity % 2 * stride, stride);
             })
        .def("copy_in", &copy_in)
        .def("copy_out", &copy_out);
}

void bind_steps(nb::class_<Arena>& arena) {
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    arena.def("set_chunks", &set_chunks)
        .def("begin", &Arena::begin, released)
        .def("post",
             [](Arena& self, std::size_t chunk) {
                 check_chunk(self, chunk);
                 self.post(chunk);
             })
        .def("publish", &Arena::publish)
        .def("commit", &Arena::commit)
        .def("wait",
             [](Arena& self, Goal goal, std::uint32_t step, std::size_t chunk) {
                 if (goal == Goal::chunk) check_chunk(self, chunk);
                 const nb::gil_scoped_release released_while_waiting;
                 return self.wait(goal, step, chunk);
             })
        .def("discard", &Arena::discard)
        .def("drain", &Arena::drain, released)
        .def("is_discarded", &Arena::is_discarded)
        .def("discarded_by", &Arena::discarded_by)
        .def("missing",
             [](const Arena& self, Goal goal, std::uint32_t step, std::size_t chunk) {
                 if (goal == Goal::chunk) check_chunk(self, chunk);
                 return self.missing(goal, step, chunk);
             })
        .def("give_up",
             [](Arena& self, std::size_t rank, Fault fault) {
                 check_rank(self, rank);
                 self.give_up(rank, fault);
             })
        .def("lost", &Arena::lost)
        .def("times", [](const Arena& self, std::size_t chunk) {
            check_chunk(self, chunk);
            return self.times(chunk);
        });
}

}  // namespace

void bind_arena(nb::module_& m) {
    nb::enum_<Goal>(m, "Goal")
        .value("CHUNK", Goal::chunk)
        .value("STEP", Goal::step)
        .value("DRAINED", Goal::drained);
    nb::enum_<Status>(m, "Status")
        .value("REACHED", Status::reached)
        .value("PENDING", Status::pending)
        .value("DISCARDED", Status::discarded)
        .value("LOST", Status::lost);
    nb::enum_<Fault>(m, "Fault")
        .value("DIED", Fault::died)
        .value("POST", Fault::post)
        .value("SUM", Fault::sum)
        .value("PUBLISH", Fault::publish)
        .value("DRAIN", Fault::drain);
    m.def("arena_nbytes", &arena_nbytes, nb::arg("num_ranks"), nb::arg("slot_nbytes"),
          nb::arg("max_chunks"), nb::arg("num_flags"),
          "Return the size in bytes of the shared file of an arena.");
    nb::class_<Arena> arena(m, "Arena");
    arena.def("__init__", &construct, nb::arg("fd"), nb::arg("rank"), nb::arg("num_ranks"),
              nb::arg("slot_nbytes"), nb::arg("max_chunks"), nb::arg("num_flags"),
              nb::arg("scale"), nb::arg("held"), nb::arg("own_core"), nb::arg("spare_core"));
    bind_memory(arena);
    bind_steps(arena);
}
