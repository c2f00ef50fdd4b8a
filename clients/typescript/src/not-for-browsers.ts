/** What a browser's build tool finds in the place of this package; its name is what the tool complains of. */

export {};

throw new Error("mlx-stream-client runs in Node: a browser cannot speak gRPC. Call it from your own server.");
