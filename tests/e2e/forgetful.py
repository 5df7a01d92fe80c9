"""A plug-in of servers that forget a silent leader soon. For servers alone: whoever imports it, forgets soon."""

from elasticps.server.roles import leaders

leaders.FORGOTTEN_S = 0.5
