"""Red flags: rules over rows and over what services say of themselves."""
