//! What an operator asks: load, live generations, adapters.   cargo run --example admin [TARGET [TOKEN]]

use mlxstream::v1::{GetLoadRequest, ListAdaptersRequest, ListGenerationsRequest};
use mlxstream::{Connect, Error};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let mut settings = Connect::to([arguments.get(1).map_or("127.0.0.1:50051", String::as_str)]);
    if let Some(token) = arguments.get(2) {
        settings = settings.token(token);
    }
    let client = settings.connect()?;

    let load = client.admin(|mut stub| async move { stub.get_load(GetLoadRequest::default()).await }).await?;
    println!(
        "{} running, {} of {} queued, {:.1} tokens per second",
        load.running, load.queued, load.queue_limit, load.decode_tps
    );
    let live =
        client.admin(|mut stub| async move { stub.list_generations(ListGenerationsRequest::default()).await }).await?;
    for generation in live.generations {
        println!("{}: {} tokens", generation.generation_id, generation.generated_tokens);
    }
    let mounted =
        client.admin(|mut stub| async move { stub.list_adapters(ListAdaptersRequest::default()).await }).await?;
    for adapter in mounted.adapters {
        println!("adapter {} of rank {}", adapter.id, adapter.rank);
    }
    Ok(())
}
