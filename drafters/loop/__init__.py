"""The decoding loop: propose, target forward, verification, commit, observe."""
