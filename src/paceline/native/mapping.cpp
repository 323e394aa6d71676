#include "mapping.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace paceline {
namespace {

// Bits in /proc/self/pagemap; see the kernel's Documentation/admin-guide/mm/pagemap.rst.
constexpr std::uint64_t present = std::uint64_t{1} << 63;
constexpr std::uint64_t swapped = std::uint64_t{1} << 62;
constexpr std::uint64_t of_file = std::uint64_t{1} << 61;

bool is_written(std::uint64_t page) { return (page & (present | swapped)) && !(page & of_file); }

// Drop the written pages among the `count` pages from `data` on; return how many were dropped.
std::size_t drop_written(char* data, const std::vector<std::uint64_t>& pages, std::size_t count) {
    std::size_t dropped = 0;
    for (std::size_t first = 0; first < count;) {
        if (!is_written(pages[first])) {
            ++first;
            continue;
        }
        std::size_t end = first;
        while (end < count && is_written(pages[end])) ++end;
        madvise(data + first * page_nbytes(), (end - first) * page_nbytes(), MADV_DONTNEED);
        dropped += end - first;
        first = end;
    }
    return dropped;
}

}  // namespace

std::size_t page_nbytes() {
    static const auto nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return nbytes;
}

Mapping::Mapping(int fd, off_t offset, std::size_t nbytes, Kind kind) : nbytes_(nbytes) {
    struct stat file;
    if (fstat(fd, &file) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
    // mmap accepts a longer range than the file, but access beyond the file's end raises SIGBUS.
    if (static_cast<std::uint64_t>(file.st_size) < static_cast<std::uint64_t>(offset) + nbytes) {
        throw std::system_error(EINVAL, std::generic_category(), "the file is too short");
    }
    const bool shared = kind == Kind::shared;
    // Do not use MAP_POPULATE for a private mapping, because it would copy every page.
    const int flags = shared ? MAP_SHARED | MAP_POPULATE : MAP_PRIVATE | MAP_NORESERVE;
    void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, offset);
    if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    data_ = static_cast<char*>(address);
    if (shared) return;
#if defined(MADV_POPULATE_READ)
    madvise(data_, nbytes, MADV_POPULATE_READ);  // older kernels map pages on access
#endif
    pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
}

Mapping::~Mapping() {
    if (pagemap_ >= 0) close(pagemap_);
    munmap(data_, nbytes_);
}

std::size_t Mapping::refresh(std::size_t offset, std::size_t nbytes) const {
    std::vector<std::uint64_t> pages(std::min(std::size_t{1} << 13, nbytes / page_nbytes()));
    char* data = data_ + offset;
    char* const end = data + nbytes;
    std::size_t dropped = 0;
    while (data < end) {
        const auto left = static_cast<std::size_t>(end - data) / page_nbytes();
        const auto wanted = std::min(pages.size(), left) * sizeof(std::uint64_t);
        const auto first = reinterpret_cast<std::uintptr_t>(data) / page_nbytes();
        const ssize_t got = pread(pagemap_, pages.data(), wanted,
                                  static_cast<off_t>(first * sizeof(std::uint64_t)));
        if (got < static_cast<ssize_t>(sizeof(std::uint64_t))) {
            madvise(data, left * page_nbytes(), MADV_DONTNEED);
            dropped += left;
            break;
        }
        const auto count = static_cast<std::size_t>(got) / sizeof(std::uint64_t);
        dropped += drop_written(data, pages, count);
        data += count * page_nbytes();
    }
    return dropped * page_nbytes();
}

}  // namespace paceline
