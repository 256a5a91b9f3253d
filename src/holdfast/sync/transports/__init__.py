"""How versions travel: a module a transport."""
