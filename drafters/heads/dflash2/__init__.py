"""DFlash2 heads: DFlash with convolutions inside a block and a selector of candidates."""
