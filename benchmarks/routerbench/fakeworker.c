// Owns a worker for the router's benchmark: one thread, epoll, HTTP/1.1, cheap enough never to be what is measured.
// Must never be used as anything else: it believes every request to be well formed.
//
//     fakeworker PORT      0: a free one; the port is printed on a line of its own
//
// What it answers is chosen by marks that stand in the target or in the first 8 KiB of the body, since some routers
// write the body anew and drop the query, but all keep the text of a prompt:
//
//     @wait=MS@   answer so much later            @status=CODE@  answer that status
//     @die@       close instead of answering      @half@         close after half of the answer
//     @close=MS@  close the connection so long after the answer
//     "stream":true -> server-sent events; @chunks=N@ of them (32), @gap=US@ apart (1000); @die@ closes after half
//
// GET /stats: counts as JSON, and the last head of a /generate. Other paths name themselves in their answer.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MARK_BYTES = 8192, HEAD_BYTES = 65536, ANSWER_BYTES = 1800, EVENT_BYTES = 290, MAX_EVENTS = 512, READ_BYTES = 65536 };

typedef enum { IN_HEAD, IN_BODY, IN_CHUNK_SIZE, IN_CHUNK, AFTER_CHUNK, IN_TRAILER, ANSWERING, LINGERING } Stage;

typedef struct Peer {
    int fd;
    Stage stage;
    bool gone, keep_alive, writing, is_head;
    // the answer that was asked for
    bool die, half, stream;
    int status, chunks, chunks_left;
    long gap_us, close_ms;
    // the request, as far as it is kept
    char marks[MARK_BYTES + 1];
    size_t marks_len;
    int64_t body_left, body_bytes;
    char target[1024];
    // bytes on their way
    char *in;
    size_t in_len, in_room;
    char *out;
    size_t out_at, out_len, out_room;
    // place in the heap of timers
    int64_t due_ns;
    int heap_at;
    struct Peer *next_gone;
} Peer;

static struct { long generates, aborted, connections, open, body_bytes, chunks, in_flight, peak; } count;
static char last_head[HEAD_BYTES];
static char answer[ANSWER_BYTES + 256], event[EVENT_BYTES + 32];
static size_t answer_len, event_len;
static int epoll_fd;
static Peer *gone_peers;

// Timers: a binary heap, the next one first

static Peer **heap;
static int heap_len, heap_room;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void heap_place(Peer *peer, int at) {
    heap[at] = peer;
    peer->heap_at = at;
}

static void heap_settle(Peer *peer, int at) {
    while (at > 0 && heap[(at - 1) / 2]->due_ns > peer->due_ns) {
        heap_place(heap[(at - 1) / 2], at);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child + 1 < heap_len && heap[child + 1]->due_ns < heap[child]->due_ns) child++;
        if (child >= heap_len || heap[child]->due_ns >= peer->due_ns) break;
        heap_place(heap[child], at);
        at = child;
    }
    heap_place(peer, at);
}

static void timer_stop(Peer *peer) {
    if (peer->heap_at < 0) return;
    Peer *last = heap[--heap_len];
    if (last != peer) heap_settle(last, peer->heap_at);
    peer->heap_at = -1;
}

static void timer_start(Peer *peer, int64_t after_ns) {
    timer_stop(peer);
    if (heap_len == heap_room) heap = realloc(heap, (heap_room = heap_room * 2 + 64) * sizeof *heap);
    peer->due_ns = now_ns() + after_ns;
    heap_settle(peer, heap_len++);
}

// Connections

static void leave(Peer *peer, bool by_client) {
    if (peer->gone) return;
    if (peer->stage == ANSWERING) {
        count.in_flight--;
        count.aborted += by_client;
    }
    timer_stop(peer);
    close(peer->fd);
    peer->gone = true;
    count.open--;
    peer->next_gone = gone_peers;  // events of this round may still name it
    gone_peers = peer;
}

static void bury(void) {
    while (gone_peers) {
        Peer *peer = gone_peers;
        gone_peers = peer->next_gone;
        free(peer->in);
        free(peer->out);
        free(peer);
    }
}

static void watch_writing(Peer *peer, bool writing) {
    if (peer->writing == writing) return;
    peer->writing = writing;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (writing ? EPOLLOUT : 0), .data.ptr = peer};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, peer->fd, &e);
}

static void put(Peer *peer, const char *bytes, size_t len) {
    if (peer->gone) return;
    if (peer->out_at == peer->out_len) {
        ssize_t sent = send(peer->fd, bytes, len, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) { leave(peer, true); return; }
        if (sent > 0) { bytes += sent; len -= sent; }
        if (!len) return;
        peer->out_at = peer->out_len = 0;
    }
    if (peer->out_len + len > peer->out_room) peer->out = realloc(peer->out, peer->out_room = 2 * (peer->out_len + len));
    memcpy(peer->out + peer->out_len, bytes, len);
    peer->out_len += len;
    watch_writing(peer, true);
}

static void put_rest(Peer *peer) {
    ssize_t sent = send(peer->fd, peer->out + peer->out_at, peer->out_len - peer->out_at, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) { leave(peer, true); return; }
    if (sent > 0) peer->out_at += sent;
    if (peer->out_at == peer->out_len) watch_writing(peer, false);
}

// Answers

static void answered(Peer *peer) {
    if (peer->gone) return;
    count.in_flight--;
    peer->stage = IN_HEAD;
    if (peer->close_ms >= 0) {
        peer->stage = LINGERING;
        timer_start(peer, peer->close_ms * 1000000LL);
    } else if (!peer->keep_alive) {
        leave(peer, false);
    }
}

static void put_answer(Peer *peer, int status, const char *type, const char *body, size_t len) {
    char head[256];
    int head_len = snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\ncontent-length: %zu\r\ncontent-type: %s\r\nserver: fake\r\n\r\n",
                            status, status < 300 ? "OK" : "As asked", len, type);
    char *whole = malloc(head_len + len);
    memcpy(whole, head, head_len);
    memcpy(whole + head_len, body, len);
    put(peer, whole, head_len + (peer->is_head ? 0 : len));
    free(whole);
    answered(peer);
}

static void put_events(Peer *peer) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    if (peer->chunks_left == peer->chunks) put(peer, head, sizeof head - 1);
    while (peer->chunks_left > 0 && !peer->gone) {
        put(peer, event, event_len);
        count.chunks++;
        peer->chunks_left--;
        if (peer->die && peer->chunks_left == peer->chunks / 2) { leave(peer, false); return; }
        if (peer->gap_us > 0) { if (!peer->gone) timer_start(peer, peer->gap_us * 1000LL); return; }
    }
    put(peer, end, sizeof end - 1);
    answered(peer);
}

static void answer_now(Peer *peer) {
    static const char refusal[] = "{\"error\":{\"message\":\"as the mark asked\",\"type\":\"BadRequestError\"}}";
    if (peer->stream && peer->status == 200) put_events(peer);
    else if (peer->die) leave(peer, false);
    else if (peer->half) { put(peer, answer, answer_len / 2); leave(peer, false); }
    else if (peer->status != 200) put_answer(peer, peer->status, "application/json", refusal, sizeof refusal - 1);
    else { put(peer, answer, answer_len); answered(peer); }
}

static bool marked(Peer *peer, const char *text) { return memmem(peer->marks, peer->marks_len, text, strlen(text)); }

static long mark(Peer *peer, const char *text, long otherwise) {
    char *at = memmem(peer->marks, peer->marks_len, text, strlen(text));
    return at ? strtol(at + strlen(text), NULL, 10) : otherwise;
}

static void generate(Peer *peer) {
    peer->marks[peer->marks_len] = 0;
    count.generates++;
    count.body_bytes += peer->body_bytes;
    peer->status = 200;
    peer->die = peer->half = false;
    long wait_ms = 0;
    peer->stream = marked(peer, "\"stream\":true") || marked(peer, "\"stream\": true");
    if (memchr(peer->marks, '@', peer->marks_len)) {
        wait_ms = mark(peer, "@wait=", 0);
        peer->status = mark(peer, "@status=", 200);
        peer->close_ms = mark(peer, "@close=", -1);
        peer->die = marked(peer, "@die@");
        peer->half = marked(peer, "@half@");
    }
    if (peer->stream) {
        peer->chunks = peer->chunks_left = mark(peer, "@chunks=", 32);
        peer->gap_us = mark(peer, "@gap=", 1000);
    }
    if (wait_ms) timer_start(peer, wait_ms * 1000000LL);
    else answer_now(peer);
}

static size_t put_stats(char *to, size_t room) {
    int len = snprintf(to, room, "{\"generates\":%ld,\"aborted\":%ld,\"connections\":%ld,\"open\":%ld,\"body_bytes\":%ld,\"chunks\":%ld,"
                       "\"in_flight\":%ld,\"peak\":%ld,\"last_head\":\"", count.generates, count.aborted, count.connections, count.open,
                       count.body_bytes, count.chunks, count.in_flight - 1, count.peak);
    for (const char *c = last_head; *c && len + 8 < (int)room; c++) {
        if (*c == '\r') continue;
        if (*c == '"' || *c == '\\' || *c == '\n') to[len++] = '\\';
        to[len++] = *c == '\n' ? 'n' : *c < 32 || *c > 126 ? '?' : *c;
    }
    return len + snprintf(to + len, room - len, "\"}");
}

static bool is_path(Peer *peer, const char *path) {
    size_t len = strlen(path);
    return !strncmp(peer->target, path, len) && strchr("?", peer->target[len]);
}

static void request_read(Peer *peer) {
    static const char model[] = "{\"model_path\":\"/fake\",\"tokenizer_path\":\"/fake\",\"served_model_name\":\"fake\",\"is_generation\":true,"
        "\"weight_version\":\"0\",\"model_type\":\"qwen3\",\"architectures\":[\"Qwen3ForCausalLM\"],\"tp_size\":1,\"dp_size\":1}";
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\",\"created\":1,\"owned_by\":\"sglang\",\"root\":\"/fake\"}]}";
    static char text[2 * HEAD_BYTES + 1024];
    peer->stage = ANSWERING;
    peer->close_ms = -1;
    if (++count.in_flight > count.peak) count.peak = count.in_flight;
    if (is_path(peer, "/generate")) generate(peer);
    else if (is_path(peer, "/stats")) put_answer(peer, 200, "application/json", text, put_stats(text, sizeof text));
    else if (is_path(peer, "/health") || is_path(peer, "/ready") || is_path(peer, "/health_generate")) put_answer(peer, 200, "text/plain", "", 0);
    else if (is_path(peer, "/v1/models")) put_answer(peer, 200, "application/json", models, sizeof models - 1);
    else if (strstr(peer->target, "info")) put_answer(peer, 200, "application/json", model, sizeof model - 1);
    else {
        int len = snprintf(text, sizeof text, "{\"target\":\"%s\",\"bytes\":%lld}", peer->target, (long long)peer->body_bytes);
        put_answer(peer, strstr(peer->target, "missing") ? 404 : 200, "application/json", text, len);
    }
}

// Requests

static bool header_is(const char *line, const char *name) { return !strncasecmp(line, name, strlen(name)); }

static void take_head(Peer *peer, const char *head, size_t len) {
    bool chunked = false;
    timer_stop(peer);
    peer->marks_len = 0;
    peer->body_left = peer->body_bytes = 0;
    peer->keep_alive = true;
    peer->is_head = !strncmp(head, "HEAD ", 5);
    const char *target = memchr(head, ' ', len);
    const char *target_end = target ? memchr(target + 1, ' ', len - (target + 1 - head)) : NULL;
    if (!target_end) { leave(peer, false); return; }
    snprintf(peer->target, sizeof peer->target, "%.*s", (int)(target_end - target - 1), target + 1);
    const char *end = head + len - 2;
    for (const char *line = memchr(head, '\n', len); ++line < end; line = memchr(line, '\n', end + 2 - line)) {
        if (header_is(line, "content-length:")) peer->body_left = strtoll(line + 15, NULL, 10);
        else if (header_is(line, "transfer-encoding:")) chunked = true;
        else if (header_is(line, "expect:")) put(peer, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        else if (header_is(line, "connection: close")) peer->keep_alive = false;
    }
    if (is_path(peer, "/generate")) {
        size_t kept = len < sizeof last_head ? len : sizeof last_head - 1;
        memcpy(last_head, head, kept);
        last_head[kept] = 0;
    }
    peer->marks_len = strlen(peer->target);
    memcpy(peer->marks, peer->target, peer->marks_len);
    peer->stage = chunked ? IN_CHUNK_SIZE : IN_BODY;
    if (!chunked && !peer->body_left) request_read(peer);
}

static void take_body(Peer *peer, const char *bytes, size_t len) {
    size_t room = MARK_BYTES - peer->marks_len, kept = len < room ? len : room;
    memcpy(peer->marks + peer->marks_len, bytes, kept);
    peer->marks_len += kept;
    peer->body_bytes += len;
    peer->body_left -= len;
    if (peer->body_left) return;
    if (peer->stage == IN_BODY) request_read(peer);
    else peer->stage = AFTER_CHUNK;
}

// How many bytes one step of parsing used; 0: it needs more.
static size_t step(Peer *peer, const char *bytes, size_t len) {
    const char *end;
    switch (peer->stage) {
    case IN_HEAD:
    case LINGERING:
        if (!(end = memmem(bytes, len, "\r\n\r\n", 4))) return 0;
        take_head(peer, bytes, end + 4 - bytes);
        return end + 4 - bytes;
    case IN_BODY:
    case IN_CHUNK:
        if ((int64_t)len > peer->body_left) len = peer->body_left;
        take_body(peer, bytes, len);
        return len;
    case IN_CHUNK_SIZE:
    case IN_TRAILER:
        if (!(end = memmem(bytes, len, "\r\n", 2))) return 0;
        if (peer->stage == IN_CHUNK_SIZE) {
            peer->body_left = strtoll(bytes, NULL, 16);
            peer->stage = peer->body_left ? IN_CHUNK : IN_TRAILER;
        } else if (end == bytes) {
            request_read(peer);
        }
        return end + 2 - bytes;
    case AFTER_CHUNK:
        if (len < 2) return 0;
        peer->stage = IN_CHUNK_SIZE;
        return 2;
    default:
        return 0;  // an answer is on its way: pipelined requests wait
    }
}

static void parse(Peer *peer) {
    size_t used = 0, one = 1;
    while (!peer->gone && used < peer->in_len && (one = step(peer, peer->in + used, peer->in_len - used))) used += one;
    if (used) memmove(peer->in, peer->in + used, peer->in_len -= used);
}

static void readable(Peer *peer) {
    for (;;) {
        if (peer->in_room < peer->in_len + READ_BYTES) peer->in = realloc(peer->in, peer->in_room = peer->in_len + 2 * READ_BYTES);
        size_t room = peer->in_room - peer->in_len;
        ssize_t got = recv(peer->fd, peer->in + peer->in_len, room, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) { leave(peer, true); return; }
        if (got < 0) return;
        peer->in_len += got;
        parse(peer);
        if (peer->gone || (size_t)got < room) return;
    }
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Peer *peer = calloc(1, sizeof *peer);
        peer->fd = fd;
        peer->heap_at = -1;
        peer->close_ms = -1;
        count.connections++;
        count.open++;
        struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = peer};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

static void run_timers(void) {
    int64_t now = now_ns();
    while (heap_len && heap[0]->due_ns <= now) {
        Peer *peer = heap[0];
        timer_stop(peer);
        if (peer->stage == LINGERING) leave(peer, false);
        else {
            answer_now(peer);
            if (!peer->gone && peer->stage == IN_HEAD && peer->in_len) parse(peer);
        }
    }
}

static int listen_on(int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t at_len = sizeof at;
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 8192)) { perror("fakeworker: bind"); exit(1); }
    getsockname(listener, (void *)&at, &at_len);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    return listener;
}

static void write_answers(void) {
    char body[ANSWER_BYTES + 64];
    size_t len = sprintf(body, "{\"text\":\"an answer\",\"meta_info\":{\"finish_reason\":{\"type\":\"length\",\"length\":32},\"output_token_logprobs\":[");
    for (int token = 0; len + 40 < ANSWER_BYTES - 4; token++) len += sprintf(body + len, "%s[-%d.%06d,%d,null]", token ? "," : "", token % 3, 123457 * token % 1000000, 1000 + 17 * token);
    len += sprintf(body + len, "]}}");
    while (len < ANSWER_BYTES) body[len++] = '\n';
    answer_len = sprintf(answer, "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: fake\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n\r\n", len);
    memcpy(answer + answer_len, body, len);
    answer_len += len;
    event_len = sprintf(event, "%x\r\ndata: {\"text\":\"%0*d\"}\n\n\r\n", EVENT_BYTES, EVENT_BYTES - 19, 7);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    write_answers();
    int listener = listen_on(argc > 1 ? atoi(argv[1]) : 0);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event listening = {.events = EPOLLIN}, events[MAX_EVENTS];
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &listening);
    for (;;) {
        struct timespec wait = {0}, *limit = NULL;
        if (heap_len) {
            int64_t left = heap[0]->due_ns - now_ns();
            if (left < 0) left = 0;
            wait = (struct timespec){left / 1000000000, left % 1000000000};
            limit = &wait;
        }
        int num = epoll_pwait2(epoll_fd, events, MAX_EVENTS, limit, NULL);
        for (int i = 0; i < num; i++) {
            Peer *peer = events[i].data.ptr;
            if (!peer) { accept_all(listener); continue; }
            if (!peer->gone && events[i].events & EPOLLOUT) put_rest(peer);
            if (!peer->gone && events[i].events & ~EPOLLOUT) readable(peer);
        }
        run_timers();
        bury();
    }
}
