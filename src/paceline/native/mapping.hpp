// Mappings of files into this process.

#pragma once

#include <cstddef>
#include <sys/types.h>

namespace paceline {

std::size_t page_nbytes();

// A part of a file mapped into memory, readable and writable; the destructor unmaps it.
class Mapping {
public:
    enum class Kind {
        shared,        // writes change the file for all processes
        copy_on_write  // a page shows the file until this process writes to the page, and copies it
    };

    // `offset` and `nbytes` must be multiples of the page size. All pages are mapped immediately,
    // so that no later access waits for a page fault. Throws std::system_error.
    Mapping(int fd, off_t offset, std::size_t nbytes, Kind kind);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

    // Copy-on-write only: drop the pages of a range that were written, so that the range shows the
    // file's content again. Return the bytes of the dropped pages. If the kernel does not report
    // which pages were written, drop all pages of the range.
    std::size_t refresh(std::size_t offset, std::size_t nbytes) const;

private:
    char* data_;
    std::size_t nbytes_;
    int pagemap_ = -1;  // file /proc/self/pagemap, for copy-on-write only
};

}  // namespace paceline
