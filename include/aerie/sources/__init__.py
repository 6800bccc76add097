"""One reader per source shape: a raw row becomes a conversation, or is refused with a reason."""
