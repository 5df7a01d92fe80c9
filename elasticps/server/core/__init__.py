"""What a server decides: the roles of its protocol, as values and events. No clock, socket or thread in here."""
