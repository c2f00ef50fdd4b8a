package mlxstream

import (
	"context"
	"iter"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// Text is a prompt of raw text.
func Text(text string) *v1.GenerateRequest_Text {
	return &v1.GenerateRequest_Text{Text: &v1.TextPrompt{Text: text}}
}

// Tokens is a prompt of token ids, used exactly as they are.
func Tokens(ids ...uint32) *v1.GenerateRequest_Tokens {
	return &v1.GenerateRequest_Tokens{Tokens: &v1.TokenPrompt{Ids: ids}}
}

// Chat is a conversation for the model's chat template, oldest turn first; its field Chat takes settings, such as tools.
func Chat(messages ...*v1.ChatMessage) *v1.GenerateRequest_Chat {
	return &v1.GenerateRequest_Chat{Chat: &v1.ChatPrompt{Messages: messages}}
}

// User is a turn of the user.
func User(text string) *v1.ChatMessage { return Message("user", text) }

// Message is a turn of any role that the template knows, such as "system" and "assistant".
func Message(role, text string) *v1.ChatMessage {
	part := &v1.ContentPart{Part: &v1.ContentPart_Text{Text: text}}
	return &v1.ChatMessage{Role: role, Content: []*v1.ContentPart{part}}
}

// Generate runs a generation to its end, and gives all of it.
func (c *Client) Generate(ctx context.Context, request *v1.GenerateRequest) (*v1.CompleteResponse, error) {
	same := &v1.CompleteRequest{} // its fields and numbers are the same
	packed, err := proto.Marshal(request)
	if err == nil {
		err = proto.Unmarshal(packed, same)
	}
	if err != nil {
		return nil, errorOf(err)
	}
	return c.Generations().Complete(ctx, same)
}

// Stream describes a generation and gives its stream. The request is sent when the stream is first read.
func (c *Client) Stream(ctx context.Context, request *v1.GenerateRequest) *Stream {
	return newStream(ctx, c, request)
}

// Resume continues a durable generation after the message with this sequence number; 0 repeats all of it.
func (c *Client) Resume(ctx context.Context, generationID string, afterSequence uint64) *Stream {
	return &Stream{client: c, parent: ctx, generationID: generationID, first: afterSequence, sequence: afterSequence}
}

// Abort ends a generation by the request id that its caller gave it. One that does not run (any more) is not an error.
func (c *Client) Abort(ctx context.Context, requestID string) (*v1.AbortResponse, error) {
	return c.abort(ctx, &v1.AbortRequest{Target: &v1.AbortRequest_RequestId{RequestId: requestID}})
}

// AbortGeneration ends a generation by the server's id of it, which [Stream.Started] tells.
func (c *Client) AbortGeneration(ctx context.Context, generationID string) (*v1.AbortResponse, error) {
	return c.abort(ctx, &v1.AbortRequest{Target: &v1.AbortRequest_GenerationId{GenerationId: generationID}})
}

// abort asks one server after the other, until one knows the generation: that one tells its account.
func (c *Client) abort(ctx context.Context, request *v1.AbortRequest) (answer *v1.AbortResponse, err error) {
	for server := range c.servers {
		told, failure := c.apart(server).Abort(ctx, request)
		switch {
		case told.GetStats() != nil:
			return told, nil
		case failure != nil:
			err = failure
		default:
			answer = told
		}
	}
	if answer != nil {
		return answer, nil
	}
	return nil, err
}

// Health gives the status of a service by the standard health protocol: "SERVING" or "NOT_SERVING". The name "" asks for
// the process, [ReadinessService] whether generations are taken.
func (c *Client) Health(ctx context.Context, service string) (string, error) {
	answer, err := c.health().Check(ctx, &healthv1.HealthCheckRequest{Service: service})
	return answer.GetStatus().String(), err
}

// WatchHealth gives the status of a service now, and again whenever it changes, until the loop is left.
func (c *Client) WatchHealth(ctx context.Context, service string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		call, err := c.health().Watch(ctx, &healthv1.HealthCheckRequest{Service: service})
		for err == nil {
			var answer *healthv1.HealthCheckResponse
			if answer, err = call.Recv(); err == nil && !yield(answer.GetStatus().String(), nil) {
				return
			}
		}
		yield("", c.failure(err))
	}
}
