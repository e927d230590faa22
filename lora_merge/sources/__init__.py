"""Models on other machines: what an address leads to, its bytes, and where they are kept here."""
