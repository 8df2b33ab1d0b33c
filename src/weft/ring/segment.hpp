// A ring's memory on this host: an anonymous file, mapped. It has no name, so nothing is left
// behind: the kernel frees it with the last descriptor and mapping, SIGKILL or not.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "log.hpp"
#include "ring.hpp"

namespace weft::ring {

// What is wrong with sizes or with a segment; becomes ValueError.
using SegmentError = std::invalid_argument;

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

class Segment {
 public:
  // Make an empty ring and return its descriptor. `sampling`, `memory_bytes`: see Header; 0 stands
  // for all of the arena.
  static int create(uint32_t slots, uint64_t arena_bytes, uint64_t sampling = 0,
                    uint64_t memory_bytes = 0) {
    const Header header =
        plan(slots, arena_bytes, sampling, memory_bytes ? memory_bytes : arena_bytes);
    const int fd = memfd_create("weft-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw SegmentError(std::string("no anonymous memory: ") + strerror(errno));
    try {
      prepare(fd, header);
    } catch (...) {
      close(fd);
      throw;
    }
    return fd;
  }

  // Map a ring. Refuses one of another version, one whose sizes do not fit its memory, and one of
  // other sampling parameters, unless they are not to be read.
  explicit Segment(int fd, std::optional<uint64_t> sampling = std::nullopt) {
    struct stat file{};
    if (fstat(fd, &file) != 0) throw SegmentError("the descriptor is not a ring");
    const auto bytes = static_cast<uint64_t>(file.st_size);
    if (!S_ISREG(file.st_mode) || bytes < kPage) throw SegmentError("the ring is truncated");
    map(fd, bytes);
    try {
      verify(sampling);
    } catch (...) {
      munmap(base_, bytes_);
      throw;
    }
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() { munmap(base_, bytes_); }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  InfoPage& info() const { return *reinterpret_cast<InfoPage*>(base_ + info_offset_); }
  LogPages& log() const { return *reinterpret_cast<LogPages*>(base_ + log_offset_); }
  uint64_t& asked(uint32_t index) const {
    return reinterpret_cast<uint64_t*>(base_ + asked_offset_)[index];
  }
  Given& given(uint32_t index) const {
    return reinterpret_cast<Given*>(base_ + given_offset_)[index];
  }
  Words words(uint32_t index) const { return {asked(index), given(index)}; }
  Slot& slot(uint32_t index) const {
    return reinterpret_cast<Slot*>(base_ + slots_offset_)[index];
  }
  std::byte* arena() const { return base_ + arena_offset_; }
  // Copies made when the ring was mapped: what the other side may write later is not believed.
  uint32_t slots() const { return slots_; }
  uint64_t arena_bytes() const { return arena_bytes_; }
  uint64_t memory_bytes() const { return memory_bytes_; }

  // Give the memory of whole pages of the arena back to the system; they read as zeros afterwards.
  // Where the system cannot do that it stays.
  void give_back(uint64_t offset, uint64_t bytes) const {
    madvise(base_ + arena_offset_ + offset, bytes, MADV_REMOVE);
  }

  // What the header of a ring of these sizes says.
  static Header plan(uint32_t slots, uint64_t arena_bytes, uint64_t sampling,
                     uint64_t memory_bytes) {
    if (slots < 1 || slots > kMaxSlots) throw SegmentError("a ring has 1 to 65535 slots");
    if (arena_bytes < kPage || arena_bytes > uint64_t{1} << 44) {
      throw SegmentError("the arena of a ring has 4 KiB to 16 TiB");
    }
    if (memory_bytes < kPage || memory_bytes > round_up(arena_bytes, kPage)) {
      throw SegmentError("the memory of a ring has 4 KiB at least, and its arena at most");
    }
    Header header{};
    header.magic = kMagic;
    header.version = kVersion;
    header.header_bytes = sizeof(Header);
    header.info_bytes = sizeof(InfoPage);
    header.slot_bytes = sizeof(Slot);
    header.slots = slots;
    header.not_slots = ~slots;
    header.info_offset = kPage;
    header.log_offset = 2 * kPage;
    header.log_bytes = sizeof(LogPages);
    header.asked_offset = header.log_offset + round_up(header.log_bytes, kPage);
    header.given_offset = round_up(header.asked_offset + slots * sizeof(uint64_t), kPage);
    header.slots_offset = round_up(header.given_offset + slots * sizeof(Given), kPage);
    header.arena_offset = round_up(header.slots_offset + slots * sizeof(Slot), kPage);
    header.arena_bytes = round_up(arena_bytes, kPage);
    header.total_bytes = header.arena_offset + header.arena_bytes;
    header.sampling = sampling;
    header.memory_bytes = round_up(memory_bytes, kPage);
    header.not_memory_bytes = ~header.memory_bytes;
    return header;
  }

 private:
  static void prepare(int fd, const Header& header) {
    const auto bytes = static_cast<off_t>(header.total_bytes);
    const bool written = fchmod(fd, 0600) == 0 && ftruncate(fd, bytes) == 0 &&
                         pwrite(fd, &header, sizeof header, 0) == sizeof header;
    // Sealed: a peer cannot shrink it under us, which would end us with SIGBUS.
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (!written || fcntl(fd, F_ADD_SEALS, seals) != 0) {
      throw SegmentError(std::string("the ring cannot be made: ") + strerror(errno));
    }
  }

  void map(int fd, uint64_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) throw SegmentError(std::string("cannot be mapped: ") + strerror(errno));
    base_ = static_cast<std::byte*>(at);
    bytes_ = bytes;
  }

  void verify(std::optional<uint64_t> sampling) {
    Header seen{};  // only the constant part: the rest is shared and changes
    std::memcpy(&seen, base_, offsetof(Header, epoch));
    if (seen.magic != kMagic) throw SegmentError("the memory does not hold a ring");
    if (seen.version != kVersion) {
      throw SegmentError("the ring has version " + std::to_string(seen.version) +
                         ", this process speaks version " + std::to_string(kVersion));
    }
    if (seen.slots < 1 || seen.slots > kMaxSlots) throw SegmentError("the ring's header is broken");
    const Header wanted = plan(seen.slots, seen.arena_bytes, seen.sampling, seen.memory_bytes);
    if (std::memcmp(&wanted, &seen, offsetof(Header, epoch)) != 0) {
      throw SegmentError("the ring's header is broken or has another layout");
    }
    if (seen.total_bytes > bytes_) throw SegmentError("the ring is truncated");
    if (sampling && *sampling != seen.sampling) {
      throw SegmentError("the ring carries other sampling parameters than this process knows");
    }
    slots_ = seen.slots;
    info_offset_ = seen.info_offset;
    log_offset_ = seen.log_offset;
    asked_offset_ = seen.asked_offset;
    given_offset_ = seen.given_offset;
    slots_offset_ = seen.slots_offset;
    arena_offset_ = seen.arena_offset;
    arena_bytes_ = seen.arena_bytes;
    memory_bytes_ = seen.memory_bytes;
    // A huge page for every few tokens would take the memory that the pages of outputs spare.
    madvise(arena(), arena_bytes_, MADV_NOHUGEPAGE);
  }

  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0, info_offset_ = 0, log_offset_ = 0, asked_offset_ = 0, given_offset_ = 0,
           slots_offset_ = 0, arena_offset_ = 0, arena_bytes_ = 0, memory_bytes_ = 0;
  uint32_t slots_ = 0;
};

// This engine has taken over. The keeper has said when the one before died; without one, it was
// alive when it last wrote its info page.
inline void append_recovery(LogPages& log, const InfoPage& info, uint64_t engine,
                            uint64_t back_ns) {
  const auto field = [&](Info name) { return load(info.values[static_cast<int>(name)]); };
  const uint64_t died_ns = field(Info::died_ns);
  const uint64_t values[kRecoveryFields] = {
      engine, load(log.steps.written), died_ns ? died_ns : field(Info::updated_ns), back_ns};
  append(log.recoveries, values);
}

}  // namespace weft::ring
