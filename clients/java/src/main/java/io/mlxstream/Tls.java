package io.mlxstream;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Path;

/**
 * TLS of a connection. Files are PEM; what is null is left out.
 *
 * @param authorities who may have signed the server's certificate; null trusts the system's authorities
 * @param certificate this client's own certificate, where the server asks for one (mTLS)
 * @param key the key of {@code certificate}
 * @param serverName the name that the server's certificate must have, in place of the target's host
 */
public record Tls(Path authorities, Path certificate, Path key, String serverName) {

  /** TLS that trusts the system's authorities. */
  public static Tls ofSystem() {
    return new Tls(null, null, null, null);
  }

  /** TLS that trusts the authorities in a file. */
  public static Tls trusting(Path authorities) {
    return new Tls(authorities, null, null, null);
  }

  ChannelCredentials credentials() {
    TlsChannelCredentials.Builder builder = TlsChannelCredentials.newBuilder();
    try {
      if (authorities != null) {
        builder.trustManager(authorities.toFile());
      }
      if (certificate != null) {
        builder.keyManager(certificate.toFile(), key.toFile());
      }
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
    return builder.build();
  }
}
