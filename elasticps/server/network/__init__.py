"""Connections of a server: sockets and transports, in the clear and with TLS, and frames on them."""
