package io.mlxstream;

import io.mlxstream.v1.CompleteResponse;
import io.mlxstream.v1.FinishReason;
import io.mlxstream.v1.GenerateStats;
import io.mlxstream.v1.GeneratedToken;
import io.mlxstream.v1.Started;
import java.util.List;

/**
 * A finished generation.
 *
 * @param text all text
 * @param tokens all tokens, without a terminating end token
 * @param finishReason why it ended; a value that this client does not know counts as unspecified
 * @param matchedStop the stop sequence that was met; empty when none was
 * @param stats its account
 * @param started the first event, with the options in effect and the seed
 */
public record Generation(
    String text,
    List<GeneratedToken> tokens,
    FinishReason finishReason,
    String matchedStop,
    GenerateStats stats,
    Started started) {

  static Generation of(CompleteResponse response) {
    var finished = response.getFinished();
    return new Generation(
        response.getText(),
        response.getTokensList(),
        known(finished.getFinishReason()),
        finished.getMatchedStop(),
        finished.getStats(),
        response.getStarted());
  }

  static FinishReason known(FinishReason reason) {
    return reason == FinishReason.UNRECOGNIZED ? FinishReason.FINISH_REASON_UNSPECIFIED : reason;
  }
}
