"""Transfer of one weight version from a publisher to its receivers: messages, links, both sides' loops."""
