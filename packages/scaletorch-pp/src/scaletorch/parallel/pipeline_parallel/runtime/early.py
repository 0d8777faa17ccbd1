"""How far messages run ahead of the actions of a rank."""

# Actions that a receive begins earlier than its message is due, so that where messages take long
# the sender knows of it in time. Each is one more buffer.
AHEAD = 4

IN_FLIGHT = 8  # sends under way before the first is waited for: what they hold stays in memory
