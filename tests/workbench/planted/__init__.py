"""An op family whose configs are wrong, crash, hang or take all memory, to test that `tilewright tune` survives them."""
