//! The client: a thin layer over the generated stubs, which adds deadlines, limits, retries and typed errors.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::RwLock;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::connection::{Headers, MESSAGE_LIMIT_BYTES, Servers, Tls, Transport, add_metadata};
use crate::stream::{MOST_ATTEMPTS, TextStream, backoff};
use crate::v1::abort_request::Target;
use crate::v1::admin_service_client::AdminServiceClient;
use crate::v1::generation_service_client::GenerationServiceClient;
use crate::v1::model_service_client::ModelServiceClient;
use crate::v1::{AbortRequest, AbortResponse, CompleteRequest, FinishReason, GenerateStats, GeneratedToken};
use crate::v1::{GetModelRequest, ModelInfo, ResumeRequest, Started, complete_request, generate_request};
use crate::{Error, Request};

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
const NO_DEADLINE: Duration = Duration::from_secs(86_400 * 365);

/// A client in plain text for "HOST:PORT" or "unix:PATH"; the network is touched by the first call.
pub fn connect(target: &str) -> Result<Client, Error> {
    Connect::to([target]).connect()
}

/// Settings of a connection.
#[derive(Clone, Debug)]
pub struct Connect {
    targets: Vec<String>,
    tls: Option<Tls>,
    metadata: Vec<(String, String)>,
    timeout: Duration,
}

impl Connect {
    /// Whom to ask: several take turns, each while its health says that it serves.
    pub fn to<'a>(targets: impl IntoIterator<Item = &'a str>) -> Self {
        let targets = targets.into_iter().map(str::to_owned).collect();
        Self { targets, tls: None, metadata: Vec::new(), timeout: DEFAULT_TIMEOUT }
    }

    /// TLS in place of plain text.
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// A bearer token, sent with every call.
    pub fn token(self, token: &str) -> Self {
        self.metadata("authorization", &format!("Bearer {token}"))
    }

    /// A value that is sent with every call.
    pub fn metadata(mut self, name: &str, value: &str) -> Self {
        self.metadata.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Deadline of every call; 600 seconds by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The client; an error of kind `InvalidRequest` names a setting that cannot be one.
    pub fn connect(self) -> Result<Client, Error> {
        let mut metadata = MetadataMap::new();
        for (name, value) in &self.metadata {
            add_metadata(&mut metadata, name, value)?;
        }
        let servers = Arc::new(Servers::new(&self.targets, self.tls.as_ref())?);
        Ok(Client {
            servers,
            target: self.targets.join(", ").into(),
            metadata: metadata.into(),
            timeout: self.timeout,
            aborting: Arc::default(),
        })
    }
}

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// All text.
    pub text: String,
    /// All tokens, without a terminating end token.
    pub tokens: Vec<GeneratedToken>,
    /// Why it ended; a value that this client does not know counts as unspecified.
    pub finish_reason: FinishReason,
    /// The stop sequence that was met; empty when none was.
    pub matched_stop: String,
    /// Its account.
    pub stats: GenerateStats,
    /// The first event, with the options in effect and the seed.
    pub started: Started,
}

/// Talks to one server, or to several in turn. Cheap to clone: clones share the connection, which ends with the last.
#[derive(Clone, Debug)]
pub struct Client {
    servers: Arc<Servers>,
    target: Arc<str>,
    metadata: Arc<MetadataMap>,
    timeout: Duration,
    aborting: Arc<RwLock<()>>,
}

impl Client {
    /// The same client with another deadline for its calls.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout, ..self.clone() }
    }

    /// Generate, and give the text as it comes.
    pub fn stream(&self, request: Request) -> TextStream {
        TextStream::generate(self.clone(), request)
    }

    /// Go on with a durable generation after the event with this number; 0 begins at its first.
    pub fn resume(&self, generation_id: impl Into<String>, after_sequence: u64) -> TextStream {
        TextStream::resume(self.clone(), ResumeRequest { generation_id: generation_id.into(), after_sequence })
    }

    /// Generate, and give all of it at the end.
    pub async fn generate(&self, request: Request) -> Result<Generation, Error> {
        let client = match request.priority {
            Some(priority) => self.with_priority(priority),
            None => self.clone(),
        };
        let message = complete_request(request);
        let answer = client
            .unary(|channel, headers| {
                let message = message.clone();
                async move { generations(channel, headers).complete(message).await }
            })
            .await?;
        let finished = answer.finished.unwrap_or_default();
        Ok(Generation {
            text: answer.text,
            tokens: answer.tokens,
            finish_reason: finished.finish_reason(),
            matched_stop: finished.matched_stop,
            stats: finished.stats.unwrap_or_default(),
            started: answer.started.unwrap_or_default(),
        })
    }

    /// End a generation by the caller's name for it. One that does not run (any more) is not an error.
    pub async fn abort(&self, request_id: impl Into<String>) -> Result<AbortResponse, Error> {
        self.abort_target(Target::RequestId(request_id.into())).await
    }

    /// End a generation by the server's id of it. One that does not run (any more) is not an error.
    pub async fn abort_generation(&self, generation_id: impl Into<String>) -> Result<AbortResponse, Error> {
        self.abort_target(Target::GenerationId(generation_id.into())).await
    }

    /// What is known about the served model.
    pub async fn model(&self) -> Result<ModelInfo, Error> {
        let answer = self.models(|mut stub| async move { stub.get_model(GetModelRequest::default()).await }).await?;
        Ok(answer.model.unwrap_or_default())
    }

    /// Make a call of the ModelService: `client.models(|mut stub| async move { stub.tokenize(request).await })`. It may be
    /// made more than once, until the server takes it up.
    pub async fn models<T, F>(&self, call: impl Fn(ModelServiceClient<Transport>) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.unary(|channel, headers| {
            call(ModelServiceClient::with_interceptor(channel, headers).max_decoding_message_size(MESSAGE_LIMIT_BYTES))
        })
        .await
    }

    /// Make a call of the AdminService: `client.admin(|mut stub| async move { stub.drain(request).await })`.
    pub async fn admin<T, F>(&self, call: impl Fn(AdminServiceClient<Transport>) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.unary(|channel, headers| {
            call(AdminServiceClient::with_interceptor(channel, headers).max_decoding_message_size(MESSAGE_LIMIT_BYTES))
        })
        .await
    }

    /// Status by the standard health protocol: "SERVING" or "NOT_SERVING". Service "" asks for liveness.
    pub async fn health(&self, service: &str) -> Result<&'static str, Error> {
        let request = HealthCheckRequest { service: service.to_owned() };
        let answer = self
            .unary(|channel, headers| {
                let request = request.clone();
                async move { HealthClient::with_interceptor(channel, headers).check(request).await }
            })
            .await?;
        Ok(answer.status().as_str_name())
    }

    /// Follow the health of a service, its status now first, for as long as `more` says so.
    pub async fn watch_health(&self, service: &str, mut more: impl FnMut(&'static str) -> bool) -> Result<(), Error> {
        let request = HealthCheckRequest { service: service.to_owned() };
        let mut stub = HealthClient::with_interceptor(self.servers.next().await, self.headers(self.deadline()));
        let failed = |status: Status| self.error(&status, None);
        let mut statuses = stub.watch(request).await.map_err(failed)?.into_inner();
        while let Some(status) = statuses.message().await.map_err(failed)? {
            if !more(ServingStatus::try_from(status.status).unwrap_or(ServingStatus::Unknown).as_str_name()) {
                break;
            }
        }
        Ok(())
    }

    pub(crate) fn with_priority(&self, priority: i32) -> Self {
        let mut metadata = self.metadata.as_ref().clone();
        metadata.insert("mlx-stream-priority", priority.into());
        Self { metadata: metadata.into(), ..self.clone() }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout.min(NO_DEADLINE)
    }

    pub(crate) async fn generations(&self, deadline: Instant) -> GenerationServiceClient<Transport> {
        generations(self.servers.next().await, self.headers(deadline))
    }

    pub(crate) fn error(&self, status: &Status, generated_tokens: Option<u32>) -> Error {
        Error::of(status, &self.target, self.timeout, generated_tokens)
    }

    /// End a generation that does not end with its call; nobody waits for it.
    pub(crate) fn abort_in_background(&self, generation_id: String) {
        let client = self.with_timeout(ABORT_TIMEOUT);
        let under_way = self.aborting.clone().try_read_owned();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = client.abort_generation(generation_id).await;
                drop(under_way);
            });
        }
    }

    /// Wait until what was left is ended, so that a resumed generation is not ended in its place.
    pub(crate) async fn aborts_are_done(&self) {
        drop(self.aborting.write().await);
    }

    async fn abort_target(&self, target: Target) -> Result<AbortResponse, Error> {
        let request = AbortRequest { target: Some(target) };
        self.unary(|channel, headers| {
            let request = request.clone();
            async move { generations(channel, headers).abort(request).await }
        })
        .await
    }

    fn headers(&self, deadline: Instant) -> Headers {
        Headers { metadata: self.metadata.as_ref().clone(), deadline: (self.timeout < NO_DEADLINE).then_some(deadline) }
    }

    /// Make a call that answers with one message, again while the server has not taken it up and allows it.
    async fn unary<T, F>(&self, call: impl Fn(Channel, Headers) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let deadline = self.deadline();
        let mut failures = 0;
        loop {
            let attempt = async { call(self.servers.next().await, self.headers(deadline)).await };
            let error = match tokio::time::timeout_at(deadline, attempt).await {
                Ok(Ok(response)) => return Ok(response.into_inner()),
                Ok(Err(status)) => self.error(&status, None),
                Err(_) => self.error(&Status::new(Code::DeadlineExceeded, ""), None),
            };
            failures += 1;
            match error.retry_pause(backoff(failures - 1)) {
                Some(pause) if failures < MOST_ATTEMPTS && Instant::now() + pause < deadline => {
                    tokio::time::sleep(pause).await
                }
                _ => return Err(error),
            }
        }
    }
}

fn generations(channel: Channel, headers: Headers) -> GenerationServiceClient<Transport> {
    GenerationServiceClient::with_interceptor(channel, headers)
        .max_decoding_message_size(MESSAGE_LIMIT_BYTES)
        .max_encoding_message_size(MESSAGE_LIMIT_BYTES)
}

/// The request of the unary call: its fields are those of the streaming one.
fn complete_request(request: Request) -> CompleteRequest {
    use {complete_request::Prompt as To, generate_request::Prompt as From};
    let message = request.message;
    let prompt = message.prompt.map(|prompt| match prompt {
        From::Text(text) => To::Text(text),
        From::Tokens(tokens) => To::Tokens(tokens),
        From::Chat(chat) => To::Chat(chat),
    });
    CompleteRequest {
        request_id: message.request_id,
        model: message.model,
        options: message.options,
        delivery: message.delivery,
        prompt,
    }
}
