package io.mlxstream;

import com.google.protobuf.ByteString;
import io.mlxstream.v1.ChatMessage;
import io.mlxstream.v1.ChatPrompt;
import io.mlxstream.v1.ContentPart;
import io.mlxstream.v1.GenerateRequest;
import io.mlxstream.v1.TextPrompt;
import io.mlxstream.v1.TokenPrompt;
import java.util.Arrays;
import java.util.List;

/**
 * What to continue. Each method begins a request, to which options are added by the schema's own builders:
 *
 * <pre>{@code
 * var request = Prompt.chat(Prompt.user("Name three rivers."));
 * request.getOptionsBuilder().setMaxTokens(60).setTemperature(0.7);
 * request.getDeliveryBuilder().setDurable(true);
 * }</pre>
 */
public final class Prompt {
  private Prompt() {}

  /** Raw text. */
  public static GenerateRequest.Builder text(String text) {
    return GenerateRequest.newBuilder().setText(TextPrompt.newBuilder().setText(text));
  }

  /** Token ids, used exactly as they are. */
  public static GenerateRequest.Builder tokens(int... ids) {
    List<Integer> all = Arrays.stream(ids).boxed().toList();
    return GenerateRequest.newBuilder().setTokens(TokenPrompt.newBuilder().addAllIds(all));
  }

  /** A conversation; the builder's chat takes tools and the other settings of the chat template. */
  public static GenerateRequest.Builder chat(ChatMessage... messages) {
    return chat(Arrays.asList(messages));
  }

  /** A conversation. */
  public static GenerateRequest.Builder chat(Iterable<ChatMessage> messages) {
    return GenerateRequest.newBuilder().setChat(ChatPrompt.newBuilder().addAllMessages(messages));
  }

  /** A turn of the user. */
  public static ChatMessage user(String text) {
    return message("user", text);
  }

  /** A turn of somebody: "system", "user", "assistant", "tool", or a role that the template knows. */
  public static ChatMessage message(String role, String text) {
    return ChatMessage.newBuilder().setRole(role).addContent(ContentPart.newBuilder().setText(text)).build();
  }

  /** A piece of a turn that shows a PNG, JPEG or WebP image. */
  public static ContentPart image(byte[] encoded) {
    return ContentPart.newBuilder().setImage(ByteString.copyFrom(encoded)).build();
  }
}
