//! Every call has a deadline: fail at it, or take what there is by then.   cargo run --example deadline [TARGET]

use std::time::Duration;

use mlxstream::v1::{DeadlinePolicy, DeliveryOptions, GenerateRequest};
use mlxstream::{Error, chat, connect, user};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let client = connect(&target)?.with_timeout(Duration::from_secs(1));
    let question = chat([user("Tell a story that never ends.")]);

    if let Err(error) = client.generate(question.clone()).await {
        println!("{:?}: {error}", error.kind);
    }

    let delivery = DeliveryOptions { deadline_policy: DeadlinePolicy::PartialResult.into(), ..Default::default() };
    let result = client.generate(GenerateRequest { delivery: Some(delivery), ..question.into() }).await?;
    let reason = result.finished.unwrap_or_default().finish_reason();
    println!("{reason:?}: {} bytes in one second", result.text.len());
    Ok(())
}
