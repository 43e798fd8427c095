"""Every use of what Ray and Tune (2.54 to 2.60) keep private, each with its reason: all of this may change with Ray's version.

That is names with an underscore, the wording of Ray's messages, what Tune keeps in memory, and environment variables
and resources that no documentation promises. No file outside of this room uses any of it; with a new Ray, read this
room first. A process imports only the files that it needs: Tune and Train take seconds each.
"""
