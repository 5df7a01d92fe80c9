"""What elasticps asks of the operating system: temporary files, room for open files. Below every other part."""
