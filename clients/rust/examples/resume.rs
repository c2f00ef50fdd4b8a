//! Streams that survive: by themselves, and from where another process stopped.   cargo run --example resume [TARGET]

use mlxstream::v1::generate_response::Event;
use mlxstream::v1::{DeliveryOptions, GenerateOptions, GenerateRequest};
use mlxstream::{Error, chat, connect, user};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let client = connect(&target)?;
    let request = GenerateRequest {
        options: Some(GenerateOptions { max_tokens: Some(100), ..Default::default() }),
        delivery: Some(DeliveryOptions { durable: true, ..Default::default() }),
        ..chat([user("Tell a story that never ends.")]).into()
    };

    // A durable stream goes on by itself when its connection is lost or its server restarts; no token is lost or doubled.
    // Dropping it frees the row; what was computed is kept for a while.
    let mut stream = client.stream(request);
    for _ in 0..20 {
        let Some(response) = stream.next_event().await else { break };
        if let Some(Event::Chunk(chunk)) = response?.event {
            print!("{}", chunk.text);
        }
    }

    // Whoever knows these two can go on, in another process too.
    let generation_id = stream.started().map(|started| started.generation_id.clone()).unwrap_or_default();
    let after_sequence = stream.sequence();
    drop(stream);
    println!("\nresume {generation_id} after {after_sequence}");
    let mut rest = client.resume(generation_id, after_sequence);
    while let Some(text) = rest.next().await {
        print!("{}", text?);
    }
    println!();
    client.close().await; // a program that leaves a durable stream and ends at once would be gone before it has said so
    Ok(())
}
