"""Layout of the memory that compiled code and Python share: int64 fields of a server, its connections, frames, entries.

All state that usual frames need lies in arrays that Python owns (`path.FastPath`, `replication.Replica`,
`replication.progress.Clocks`). Compiled code finds them by their addresses in the header `h`, so both read and write
the same memory. Rows of `int64 [n, K]` are addressed as `address + 8 * (row * K + field)`.
"""

from __future__ import annotations

# Why a call of `receive.consume` returns.
DONE = 0  # every whole frame was handled; the rest of one may follow
SLOW = 1  # the frame at the front is not usual: Python has to handle it; nothing has changed
BROKEN = 2  # the bytes at the front are no frame
ROWS_MISSING = 3  # H_INFO: the block whose rows need memory; call again then
FLUSH = 4  # what is queued has to leave before this connection goes on
PAUSED = 5  # the peer does not read our answers, so its frames wait
ROOM = 6  # the connection's chunk cannot hold the frame that has begun: H_INFO bytes are needed
TURN = 8  # H_TURN bytes were handled: others have their turn
KEEP = 12  # a checkpoint may need copies of H_SIZE rows of the table of block H_INFO: make room for them
LISTS = 13  # a connection needs memory for lists of keys
PACKED_BODY = 15  # the frame at the front has to be unpacked
UNREADABLE = 14  # the frame at the front has keys that cannot be read
WIDER = 16  # as ROOM, for a frame that grows while it is expanded
LEFT = 17  # the frame at the front would have to be expanded, but the connection is full: it stays as it came

CANDIDATES_MISSING = 18  # as ROWS_MISSING: keys of the block that wait for a row need memory
MEMORY_MISSING = (ROWS_MISSING, CANDIDATES_MISSING)  # nothing else may happen before the frame goes on
GROW = 7  # the arena, the segments or the scratch rows are too small: H_INFO says which, H_SIZE how much

# What `sockets.turn` ends with besides.
IDLE = 9  # nothing is left to do for now
WRITABLE = 10  # the connection H_AT takes bytes again
CLOSED = 11  # it has ended: H_INFO is the error's number, 0 when the peer has closed it

GROW_ARENA, GROW_ROWS, GROW_SEGMENTS = 0, 1, 2

# Fields of the header.
(
    H_EPOCH,
    H_RANGES,  # P
    H_ENABLED,
    H_CAREFUL,  # something waits that a usual push, forward or acknowledgement could overtake
    H_GUARDED,  # acknowledgements of some range wait for its joiner
    H_BUDGET,  # bytes of the log at which pushes wait
    H_PYTHON_BYTES,  # of the log's entries that Python keeps
    H_RECENT_BYTES,  # of the recent entries, which compiled code holds
    H_RECENT,  # how many recent entries there are
    H_NUMBER,  # of the newest entry
    H_ORDERS,  # int64 [ORDERS, 4]: epoch, ranges headed, their address, the address of their positions [P]
    H_ORDER_COUNT,
    H_SEQ,
    H_ACKED,
    H_JOINED,
    H_SINCE,
    H_UP,  # slot of the predecessor of a range, -1 for none
    H_DOWN,  # of the successor, or of the joiner
    H_FLAGS,  # T_… of a range
    H_BOUNDS,  # of a range that is being filled here: the place (hash >> 2) below which its keys are there
    H_PEERS,  # int64 [slots, PEER], the neighbours in chains: see P_…
    H_CLOCKS,  # int64 [workers, columns]: progress, in column 0 always 0
    H_COLUMNS,  # int64 [P]: the column of a range in which somebody has made progress, 0 of others
    H_COLUMN_COUNT,
    H_WORKERS,  # int64 [workers]: whose row it is, 0 for nobody's
    H_WORKER_COUNT,
    H_ROW_HINTS,  # int64 [H_ROW_MASK + 1], by the last bits of a worker's id: where its row was found last
    H_ROW_MASK,
    H_ACKNOWLEDGED,  # int64 [workers]: the clock up to which a worker knows its steps to be committed
    H_REFUSED,  # int64 [workers]: the newest step of a worker of which rows were refused, 0 for none
    H_TABLES,  # int64 [n, TABLE]: see TABLE_…
    H_TABLE_COUNT,
    H_CONNECTIONS,
    H_FRAMES,
    H_FRAME_RANGES,  # int32 [frames, H_STRIDE]
    H_FREE_FRAMES,
    H_FREE_FRAME_COUNT,
    H_ENTRIES,
    H_ENTRY_RANGES,  # int32 [entries, H_STRIDE]
    H_ENTRY_SEQS,  # int64 [entries, H_STRIDE]
    H_STRIDE,  # the most ranges of a frame or entry: a power of two, no less than this server has a copy of, or P
    H_FREE_ENTRIES,
    H_FREE_ENTRY_COUNT,
    H_REFS,  # int64 [chunks]: frames of recent entries whose bytes lie in a chunk
    H_ARENA,  # where answers and the small parts of messages are written
    H_ARENA_USED,
    H_ARENA_SIZE,
    H_SEGMENTS,  # int64 [n, 4]: connection, chunk (-1: the arena), offset, bytes: what leaves, in order
    H_SEGMENT_COUNT,
    H_SEGMENT_SIZE,
    H_NOTES,  # int64 [NOTES, 4]: set, shard, worker, clock of pushes that train a shard, for Python to note
    H_NOTE_COUNT,
    H_RECORDS,  # records of sparse steps, for Python to note: each its worker, its clock, and as it is on the wire
    H_RECORD_COUNT,
    H_TAILED,  # int64 [n]: ranges whose tail this server is
    H_TAILED_COUNT,
    H_HELD,  # int64 [n]: ranges of which it is a full replica
    H_HELD_COUNT,
    H_TAIL_SINCE,  # epochs in which these last changed
    H_FULL_SINCE,
    H_BLOCKS,  # int64 [2 * BLOCKS, BLOCK]: the frame at hand, see B_…, and behind it what of it is applied
    H_INSIDE,  # how many blocks the latter has, -1 if all of the frame is applied
    H_STARTS,  # int64 [BLOCKS, P + 1]: the first row of a block at each position of the frame's ranges
    H_CHUNK,  # bytes of rows in one frame of an answer
    H_ROWS,  # int64 [H_ROWS_SIZE]: addresses of the frame's rows
    H_ROWS_SIZE,
    H_MISSING,  # int64 [3, H_ROWS_SIZE]: keys of a block that have no row, where they stand in it, and their new rows
    H_MISSING_COUNT,
    H_COUNTED,  # float32 [H_ROWS_SIZE]: pushes of these keys before this one, see `admission.admit`
    H_MAKING,  # 1 + the index of the block whose missing rows are being made, 0 for none: the frame waits for memory
    H_ADMITTING,  # 1 + the first of its missing keys that has not been counted, 0 if they have not been collected
    H_SCRATCH,  # int64 [P]: the ranges of a message
    H_POSITIONS,  # int64 [P]: where a range stands in a message, -1 elsewhere and between calls
    H_SLOTS,  # int64 [SLOTS]: the successors of a frame
    H_TURN,
    H_INFO,
    H_SIZE,
    H_CHANGED,  # grows with everything that may let a waiting pull go on
    H_PUSHES,
    H_PULLS,
    H_ROWS_PUSHED,
    H_ROWS_PULLED,
    H_FORWARDS,
    H_APPLIED,
    H_ROWS_APPLIED,
    H_RECEIVED_PUSH,  # bytes of bodies, by kind
    H_RECEIVED_PULL,
    H_RECEIVED_FORWARD,
    H_NOW,  # nanoseconds, when the bytes at hand came; 0 when nobody measures
    H_SAMPLE,  # one push in so many is measured, a power of two
    H_WAITED,  # int64 [n]: how long pushes waited for their answers, in nanoseconds, since Python looked last
    H_WAITED_COUNT,
    H_ROOM,  # bytes that new rows may still take, here and down the chains
    H_EPOLL,  # descriptor of the epoll that watches the connections
    H_EVENTS,  # where it writes what has happened
    H_SLOT_OF,  # int64 [descriptors]: the connection of each
    H_MESSAGE,  # a msghdr and its vector
    H_CHUNK_ADDRESSES,  # int64 [chunks]
    H_AT,  # the connection for which Python has to do something
    H_DECODED,  # float32 [DECODED]: some rows as they are before a table's filters, or after
    H_JOURNAL,  # header of the journal of changed keys, see store.journal; 0 while no reader is attached
    H_FIELDS,
) = range(102)

ORDER = 4
PEER, P_CONNECTION, P_FIRST, P_LAST, P_PYTHON = 4, 0, 1, 2, 3  # P_PYTHON: entries that Python holds for this peer
(
    TABLE_ID,
    TABLE_HEADER,
    TABLE_UPDATE,
    TABLE_VALUES,
    TABLE_APP,  # 0 if unknown
    TABLE_PUSH,  # the code of its filters for pushes, see store.codec
    TABLE_PUSH_WORDS,  # of one row
    TABLE_PULL,
    TABLE_PULL_WORDS,
    TABLE,
) = range(10)
SEGMENT = 4
NOTE = 4

# Of a range.
T_WAITS = 1  # kept in the log until the successor acknowledges
T_SYNCED = 2  # the successor gets operations
T_QUIET = 4  # being filled here: operations are applied in part
T_FED = 8  # this server is the tail, and the successor a joiner
T_COUNTED = 16  # acknowledgements wait for that joiner
T_REPORTED = 32  # it has been reported level

# Of a connection.
(
    C_SERIAL,  # grows each time the slot is used again
    C_CHUNK,
    C_ADDRESS,  # of the chunk
    C_BYTES,  # its size
    C_START,
    C_END,
    C_PINNED,  # Python refers to the chunk: its front must not be received over
    C_ROLE,
    C_SLOW,  # every frame goes to Python
    C_LIMIT,  # bytes of a body
    C_PAUSED,  # the peer does not read what we send
    C_WORKER,
    C_APP,  # the number of its application
    C_BASE,  # the clock that the worker starts above, -1 before it has joined
    C_ROSTERED,
    C_SET,  # a set of shards that belongs to the worker's application, 0 for none
    C_PEER,  # the slot of the member whose current link this is, -1 for none
    C_AFTER,  # how many ranges READ_AFTER named whose steps pulls have to see, 0 for none
    C_AFTER_AT,  # int64 [2, C_AFTER_ROOM]: those ranges, and the worker's progress there; 0 as long as there is no room
    C_AFTER_ROOM,
    C_AFTER_EPOCH,  # of the view by which it was sent
    C_ANSWERED,  # rows already sent of the pull at the front
    C_FD,  # -1: only Python receives and sends
    C_QUEUED,  # Python has bytes that go first
    C_HEARD,  # nanoseconds of the monotonic clock, when bytes came last
    C_FULL,  # nothing more is read
    C_LISTS,  # int64 [LIST_KEYS]: keys that the worker has had kept, 0 as long as there are none
    C_EPOCH,  # of the newest view that the peer has, as far as is known
    CONNECTION,
) = range(29)
ROLE_OTHER, ROLE_WORKER, ROLE_PEER = 0, 1, 2

# Of a frame in the log.
(
    F_CONNECTION,  # whom to answer, -1 for nobody
    F_SERIAL,
    F_REQUEST,
    F_LEFT,  # entries that wait
    F_BYTES,
    F_CHUNK,
    F_OFFSET,  # of the frame's header in the chunk
    F_WORKER,
    F_AFTER,
    F_BEFORE,
    F_COUNT,  # of ranges
    F_CAME,
    FRAME,
) = range(13)

# Of an entry.
E_FRAME, E_COUNT, E_NEXT, E_NUMBER, ENTRY = 0, 1, 2, 3, 4

# Of a block of the frame at hand.
(
    B_TABLE,
    B_HEADER,  # address of the table's header
    B_UPDATE,
    B_ROWS,
    B_DIM,  # words of a row; without filters the table's dim
    B_VALUES,  # how many step values
    B_VALUES_AT,
    B_KEYS_AT,
    B_GRADS_AT,
    B_CODE,  # of its filters
    B_FIRST,  # of its rows' addresses in H_ROWS; from here on, what `find_rows` has found
    B_STALE,  # how many of them a checkpoint may want as they are, at most
    B_ADMITS,  # 1 if keys are counted that have no row
    BLOCK,
) = range(14)

ORDERS = 8
BLOCKS = 256
SLOTS = 64
NOTES = 256
RECORDS = 64
WAITED = 1024
DECODED = 1 << 16  # floats, as many as a row can have
SMALL_BYTES = 16 << 10  # a slice of a received frame is copied behind its header up to this size
ARENA_BYTES = 1 << 20
ARENA_HIGH_BYTES = 256 << 10  # with so much queued the rest of a buffer waits until it has left
READ_ROOM_BYTES = 8 << 10  # a chunk with less room behind the last frame is replaced
