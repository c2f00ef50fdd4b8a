package io.mlxstream;

/**
 * What a generation has used so far.
 *
 * @param promptTokens tokens of the prompt, cached ones included
 * @param cachedTokens prompt tokens whose state was already there
 * @param generatedTokens tokens that were generated
 */
public record Usage(int promptTokens, int cachedTokens, int generatedTokens) {}
