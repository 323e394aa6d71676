// The extension module paceline.native._native.

#include <nanobind/nanobind.h>

void bind_sum(nanobind::module_& m);
void bind_arena(nanobind::module_& m);
void bind_codec(nanobind::module_& m);
void bind_dense(nanobind::module_& m);

NB_MODULE(_native, m) {
    // Do not warn if a program ends without closing its arenas; the kernel frees their memory.
    nanobind::set_leak_warnings(false);
    bind_sum(m);
    bind_arena(m);
    bind_codec(m);
    bind_dense(m);
}
