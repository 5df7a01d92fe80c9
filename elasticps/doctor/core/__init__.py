"""What facts about a machine mean. Pure."""
