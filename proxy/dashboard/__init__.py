"""The dashboard below `/corral/`: its page, sessions, live state and actions."""
