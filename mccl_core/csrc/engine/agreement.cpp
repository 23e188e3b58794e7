// Agreement on who leaves a group, among those who stay, over their own connections.
//
//   vote      to all: whom this rank's caller named, whom it knows to be excluded by anybody or lost, and the proposal
//             that it has adopted
//   propose   by the coordinator, the lowest rank that nobody excludes, once all who stay have voted: the union
//   decided   by the coordinator, once all who stay have adopted the proposal; passed on by whoever learns it
//
// A rank adopts a proposal that leaves out all whom it knows to be excluded, and votes anew whenever it learns of
// another one; so does every loss of a connection. A later coordinator hears of a verdict from anyone who has it, since
// it waits for the votes of all. 3N frames and the votes along the links, without a fault; as much again for each.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "engine/engine.hpp"

namespace mccl {

namespace {
enum class Say : uint8_t { kVote = 1, kPropose = 2, kDecided = 3 };

struct Message {
  Say say = Say::kVote;
  bool unanimous = false;
  uint32_t round = 0;
  uint64_t ballot = 0;
  RankSet excluded;
  RankSet named;
};

constexpr size_t kFixedNbytes = 2 + sizeof(uint32_t) + sizeof(uint64_t);

size_t bitmap_nbytes(size_t world) { return (world + 7) / 8; }

void append(std::string& to, const RankSet& set) {
  const size_t at = to.size();
  to.resize(at + bitmap_nbytes(set.size()));
  for (size_t i = 0; i < set.size(); ++i) {
    if (set[i]) to[at + i / 8] = static_cast<char>(to[at + i / 8] | 1 << i % 8);
  }
}

RankSet read_set(const std::byte* from, size_t world) {
  RankSet set(world);
  for (size_t i = 0; i < world; ++i) set[i] = (std::to_integer<int>(from[i / 8]) >> i % 8 & 1) != 0;
  return set;
}

std::string encode(const Message& message) {
  std::string payload;
  payload += static_cast<char>(message.say);
  payload += static_cast<char>(message.unanimous);
  payload.append(reinterpret_cast<const char*>(&message.round), sizeof message.round);
  payload.append(reinterpret_cast<const char*>(&message.ballot), sizeof message.ballot);
  append(payload, message.excluded);
  append(payload, message.named);
  return payload;
}

std::optional<Message> decode(const std::byte* data, size_t nbytes, size_t world) {
  if (nbytes != kFixedNbytes + 2 * bitmap_nbytes(world)) return std::nullopt;
  Message message;
  message.say = static_cast<Say>(data[0]);
  message.unanimous = data[1] != std::byte{0};
  std::memcpy(&message.round, data + 2, sizeof message.round);
  std::memcpy(&message.ballot, data + 2 + sizeof message.round, sizeof message.ballot);
  message.excluded = read_set(data + kFixedNbytes, world);
  message.named = read_set(data + kFixedNbytes + bitmap_nbytes(world), world);
  return message;
}

bool includes(const RankSet& larger, const RankSet& smaller) {
  for (size_t i = 0; i < larger.size(); ++i) {
    if (smaller[i] && !larger[i]) return false;
  }
  return true;
}

void merge(RankSet& into, const RankSet& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = into[i] || other[i];
}

int32_t coordinator_of(const RankSet& excluded) {
  return static_cast<int32_t>(std::ranges::find(excluded, false) - excluded.begin());
}

bool alive(const Link& link) { return link.send && !link.send->lost && !link.left(); }
bool gone(const Link& link) {
  return link.left() || (link.send && link.send->lost) || (link.receive && link.receive->lost);
}
}  // namespace

std::string describe(const RankSet& set) {
  std::string text;
  for (size_t i = 0; i < set.size(); ++i) {
    if (set[i]) text += (text.empty() ? "" : ", ") + std::to_string(i);
  }
  return text.empty() ? "none" : text;
}

void Engine::begin_round(Group& group, uint32_t round) {
  Agreement& agreement = group.agreement;
  const auto world = static_cast<size_t>(group.world());
  auto verdicts = std::move(agreement.verdicts);
  agreement = {};
  agreement.verdicts = std::move(verdicts);
  agreement.round = round;
  agreement.named.assign(world, false);
  agreement.excluded.assign(world, false);
  agreement.votes.resize(world);
}

static std::string encode_verdict(const Agreement& agreement) {
  const Verdict& verdict = *agreement.verdict;
  const RankSet none(verdict.excluded.size());
  return encode(Message{Say::kDecided, verdict.unanimous, agreement.round, 0, verdict.excluded, none});
}

void Engine::send_to_members(Group& group, const std::string& payload) {
  for (int32_t rank = 0; rank < group.world(); ++rank) say(group, rank, payload);
}

void Engine::say(Group& group, int32_t to, const std::string& payload) {
  const Link& link = group.link(to, 0);
  if (to == group.rank || !alive(link)) return;
  ControlFrame frame;
  frame.header.type = FrameType::kAgree;
  frame.header.key.group = group.id;
  frame.payload = payload;
  queue_control(*link.send, std::move(frame));
}

void Engine::cast_vote(Group& group) {
  const Agreement& agreement = group.agreement;
  send_to_members(group, encode(Message{Say::kVote, false, agreement.round, agreement.adopted, agreement.excluded,
                                        agreement.named}));
}

// Whatever has changed: what this rank knows goes out, and, where it is the coordinator, the agreement goes on.
void Engine::advance_agreement(Group& group, bool changed) {
  Agreement& agreement = group.agreement;
  if (!agreement.started || agreement.verdict) return;
  for (size_t i = 0; i < group.links.size(); ++i) {
    const size_t rank = i % group.members.size();
    if (agreement.excluded[rank] || !gone(group.links[i])) continue;
    agreement.excluded[rank] = true;
    changed = true;
  }
  agreement_changed_.notify_all();
  const auto me = static_cast<size_t>(group.rank);
  const bool coordinates = coordinator_of(agreement.excluded) == group.rank;
  const auto all_who_stay = [&](auto&& holds) {
    for (size_t rank = 0; rank < agreement.votes.size(); ++rank) {
      if (rank != me && !agreement.excluded[rank] && !holds(agreement.votes[rank])) return false;
    }
    return true;
  };
  const auto voted = [](const Agreement::Vote& vote) { return vote.cast; };
  if (coordinates && all_who_stay(voted) && (agreement.proposed == 0 || agreement.proposal != agreement.excluded)) {
    uint64_t highest = agreement.adopted;
    for (const auto& vote : agreement.votes) highest = std::max(highest, vote.adopted);
    agreement.proposed = ((highest >> 32) + 1) << 32 | static_cast<uint32_t>(group.rank);
    agreement.proposal = agreement.excluded;
    agreement.adopted = agreement.proposed;
    changed = true;
    send_to_members(group, encode(Message{Say::kPropose, false, agreement.round, agreement.proposed, agreement.proposal,
                                          agreement.named}));
  }
  if (changed) cast_vote(group);
  const auto adopted = [&](const Agreement::Vote& vote) { return vote.adopted == agreement.proposed; };
  if (!coordinates || agreement.proposed == 0 || agreement.proposal != agreement.excluded || !all_who_stay(adopted)) {
    return;
  }
  const auto named_just_these = [&](const Agreement::Vote& vote) { return vote.named == agreement.proposal; };
  decide(group, {agreement.proposal, agreement.named == agreement.proposal && all_who_stay(named_just_these)});
}

void Engine::decide(Group& group, Verdict verdict) {
  Agreement& agreement = group.agreement;
  agreement.verdict = agreement.verdicts[agreement.round] = std::move(verdict);
  send_to_members(group, encode_verdict(agreement));
  agreement_changed_.notify_all();
  if (!agreement.verdict->excluded[static_cast<size_t>(group.rank)] || group.failure) return;
  end_group(group, std::make_shared<const Error>(excluded_error(group, *agreement.verdict)));
}

Error Engine::excluded_error(const Group& group, const Verdict& verdict) {
  ErrorInfo info;
  info.code = Code::kExcluded;
  info.rank = group.rank;
  const int32_t coordinator = coordinator_of(verdict.excluded);
  if (coordinator < group.world()) {  // a wrong peer may say that nobody stays
    info.peer = coordinator;
    info.peer_host = group.members[static_cast<size_t>(coordinator)].host;
  }
  info.detail = "goes on with the others in a smaller group, without rank(s) " + describe(verdict.excluded);
  info.advice =
      "This rank was named by another one, or they had lost it: see their logs. End this process, or start "
      "it anew and let it join a new group";
  return Error(std::move(info));
}

void Engine::on_agree(Connection& connection, const FrameHeader& header, const std::byte* payload) {
  const auto found = groups_.find(header.key.group);
  if (found == groups_.end()) {
    keep_notice(connection, header, payload);
    const auto verdict = verdicts_.find(header.key.group);
    if (verdict == verdicts_.end() || payload[0] == std::byte{static_cast<uint8_t>(Say::kDecided)}) return;
    ControlFrame answer;  // this rank has gone on already; whoever asks has not heard
    answer.header.type = FrameType::kAgree;
    answer.header.key.group = header.key.group;
    answer.payload = verdict->second;
    queue_control(connection, std::move(answer));
    return;
  }
  Group& group = *found->second;
  Agreement& agreement = group.agreement;
  const int32_t from = group.rank_of(connection.process);
  const auto message = decode(payload, header.payload_nbytes, group.members.size());
  if (from < 0 || !message) return;
  constexpr uint32_t kMostRounds = 1024;                            // a wrong peer could go on for ever
  if (message->round == 0 || message->round > kMostRounds) return;  // they count from 1
  if (message->round == agreement.round + 1 && (agreement.round == 0 || agreement.verdict)) {
    begin_round(group, message->round);
  }
  if (message->round != agreement.round) return;
  const auto sender = static_cast<size_t>(from);
  const bool here = !message->excluded[static_cast<size_t>(group.rank)];
  if (message->say == Say::kDecided) {
    if (agreement.verdict || (here && (!agreement.started || agreement.excluded[sender]))) return;
    decide(group, {message->excluded, message->unanimous});
    return;
  }
  if (agreement.verdict) {
    say(group, from, encode_verdict(agreement));
    return;
  }
  if (message->say == Say::kPropose) {
    const bool acceptable = agreement.started && here && !agreement.excluded[sender] &&
                            includes(message->excluded, agreement.excluded) && message->ballot > agreement.adopted;
    if (!acceptable) return;
    agreement.adopted = message->ballot;
    agreement.excluded = message->excluded;
    advance_agreement(group, true);
    return;
  }
  agreement.votes[sender] = {true, message->named, message->ballot};
  const RankSet before = agreement.excluded;
  if (!before[sender]) merge(agreement.excluded, message->excluded);
  advance_agreement(group, agreement.excluded != before);
}

Verdict Engine::agree(const std::shared_ptr<Group>& group, const RankSet& named, TimePoint deadline,
                      const std::function<void(int32_t)>& connect) {
  Lock lock(*this);
  if (group->closed) throw_usage("this group was destroyed", "Make a new group with torch.distributed.new_group");
  Agreement& agreement = group->agreement;
  const auto me = static_cast<size_t>(group->rank);
  if (agreement.verdict && agreement.verdict->excluded[me]) throw excluded_error(*group, *agreement.verdict);
  if (agreement.verdict && agreement.verdict->excluded == named) return {named, true};  // the caller says yes to it
  if (agreement.round == 0 || agreement.verdict) begin_round(*group, agreement.round + 1);
  const uint32_t round = agreement.round;
  agreement.started = true;
  agreement.named = named;
  merge(agreement.excluded, named);
  advance_agreement(*group, true);
  RankSet dialled(group->members.size());
  while (!agreement.verdicts.contains(round)) {
    const int32_t coordinator = coordinator_of(agreement.excluded);
    const auto index = static_cast<size_t>(coordinator);
    if (coordinator < group->world() && coordinator != group->rank && !group->link(coordinator, 0).complete() &&
        !dialled[index]) {
      dialled[index] = true;
      lock.unlock();
      bool reached = true;
      try {
        connect(coordinator);
      } catch (const Error&) {
        reached = false;
      }
      lock.lock();
      if (!reached && !group->link(coordinator, 0).complete()) agreement.excluded[index] = true;
      advance_agreement(*group, true);
      continue;
    }
    if (now_ns() >= deadline) {
      RankSet missing(group->members.size());
      for (size_t rank = 0; rank < missing.size(); ++rank) {
        missing[rank] = rank != me && !agreement.excluded[rank] && !agreement.votes[rank].cast;
      }
      ErrorInfo info;
      info.code = Code::kTimeout;
      info.rank = group->rank;
      info.detail =
          "the ranks did not agree in time on whom to exclude; nothing was heard from rank(s) " + describe(missing);
      info.advice = "All who stay must call shrink on the same group; exclude those who cannot";
      throw Error(std::move(info));
    }
    const int64_t left = deadline == kNever ? kLongest_ms : (deadline - now_ns()) / 1'000'000 + 1;
    agreement_changed_.wait_for(lock, std::chrono::milliseconds(std::min<int64_t>(left, 3'600'000)));
  }
  const Verdict verdict = agreement.verdicts.at(round);
  if (verdict.excluded[me]) throw excluded_error(*group, verdict);
  return verdict;
}

// Kept when the group is closed: somebody may still have to hear of it.
void Engine::keep_verdict(const Group& group) {
  constexpr size_t kMostGroups = 1024;
  if (!group.agreement.verdict || verdicts_.size() >= kMostGroups) return;
  verdicts_[group.id] = encode_verdict(group.agreement);
}

}  // namespace mccl
