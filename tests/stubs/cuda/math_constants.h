/* Generated sources include it; what they use of it is in shim.h. */
