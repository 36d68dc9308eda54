"""Chat on top of exact tokens: templates that only ever append, tool calls, and the capture of message histories."""
